// Generates answers in a thread of its own, for a program whose loop never waits. Needs no ROS:
// robot_speech.cpp runs it in a terminal, ros2/node.cpp in a node.
#pragma once

#include <edge.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace robot {

struct Manner {
  double deadline_s = 10;
  double temperature = -1;  // below 0: the bundle's default
  // Text that the model's chat template writes around a user's message.
  std::string begin = "<|user|>", end = "<|end|><|assistant|>";
};

class Speech {
 public:
  using Heard = std::function<void(const std::string&)>;  // called with each piece of text
  using Done = std::function<void(edge_finish, const std::string& error)>;

  // Both are called in the thread that answers. Throws std::runtime_error.
  Speech(const std::string& bundle, Manner manner, Heard heard, Done done)
      : manner_(std::move(manner)), heard_(std::move(heard)), done_(std::move(done)) {
    edge_error error;
    edge_bundle* opened = nullptr;
    check(edge_bundle_open(bundle.c_str(), &opened, &error), error);
    bundle_.reset(opened);
    edge_model* model = nullptr;
    check(edge_model_load(opened, nullptr, &model, &error), error);
    edge_session* session = nullptr;
    edge_status status = edge_session_new(model, nullptr, &session, &error);
    edge_model_close(model);  // the session keeps it open
    check(status, error);
    session_.reset(session);
    edge_decoder* decoder = nullptr;
    check(edge_decoder_new(opened, nullptr, &decoder, &error), error);
    decoder_.reset(decoder);
    check(edge_bundle_sampling(opened, &sampling_, &error), error);
    if (manner_.temperature >= 0) sampling_.temperature = manner_.temperature;
    how_.sampling = &sampling_;
    how_.deadline_s = manner_.deadline_s;
    how_.user = this;
    how_.on_token = [](void* self, int32_t token) { return static_cast<Speech*>(self)->hear(token); };
    thread_ = std::thread([this] { work(); });
  }

  ~Speech() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    changed_.notify_one();
    edge_session_cancel(session_.get());
    thread_.join();
  }

  // Returns false while an answer is in progress. Never waits for the model.
  bool ask(std::string question) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (busy_) return false;
    busy_ = true;
    question_ = std::move(question);
    changed_.notify_one();
    return true;
  }

  // Ends the answer within a token.
  void stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (busy_) edge_session_cancel(session_.get());
  }

 private:
  template <class T, void (*End)(T*)>
  struct Ends {
    void operator()(T* handle) const { End(handle); }
  };
  template <class T, void (*End)(T*)>
  using Owned = std::unique_ptr<T, Ends<T, End>>;

  static void check(edge_status status, const edge_error& error) {
    if (!status) return;
    std::string where;
    for (const char* part : {error.file, error.field})  // either may be empty
      if (*part) where += std::string(part) + ": ";
    throw std::runtime_error(where + error.message);
  }

  int hear(int32_t token) {
    const char* text = "";
    if (edge_decoder_feed(decoder_.get(), token, &text, nullptr, nullptr, nullptr)) return 1;
    if (*text) heard_(text);
    return 0;
  }

  // User input is an untrusted part of its own, so that nobody can inject control tokens.
  std::vector<int32_t> tokens(const std::string& question) {
    const edge_part parts[] = {{manner_.begin.data(), manner_.begin.size(), 1},
                               {question.data(), question.size(), 0},
                               {manner_.end.data(), manner_.end.size(), 1}};
    size_t count = 0;
    edge_error error;
    std::vector<int32_t> out(manner_.begin.size() + question.size() + manner_.end.size() + 16);
    check(edge_bundle_prompt(bundle_.get(), parts, 3, out.data(), out.size(), &count, &error), error);
    out.resize(count);
    return out;
  }

  edge_finish answer(const std::string& question) {
    edge_error error;
    edge_result result = EDGE_RESULT;
    std::vector<int32_t> prompt = tokens(question);
    auto run = [&] {
      return edge_generate(session_.get(), prompt.data(), prompt.size(), &how_, &result, &error);
    };
    edge_status status = run();
    if (status == EDGE_ERROR_CONTEXT_FULL) {  // forget the earlier conversation
      check(edge_session_clear(session_.get(), &error), error);
      status = run();
    }
    const char* rest = "";
    edge_decoder_finish(decoder_.get(), &rest, nullptr, nullptr);
    if (*rest) heard_(rest);
    check(status, error);
    return result.finish;
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return over_ || question_; });
      if (over_) return;
      std::string question = std::move(*question_), problem;
      question_.reset();
      lock.unlock();
      edge_finish finish = EDGE_FINISH_STOP;
      try {
        finish = answer(question);
      } catch (const std::exception& caught) {
        problem = caught.what();
      }
      lock.lock();
      edge_session_resume(session_.get());  // drop a stop that came too late
      busy_ = false;
      lock.unlock();
      done_(finish, problem);
      lock.lock();
    }
  }

  Manner manner_;
  Heard heard_;
  Done done_;
  Owned<edge_bundle, edge_bundle_close> bundle_;
  Owned<edge_session, edge_session_free> session_;
  Owned<edge_decoder, edge_decoder_free> decoder_;
  edge_sampling sampling_ = EDGE_SAMPLING;
  edge_generation how_ = EDGE_GENERATION;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::string> question_;
  bool busy_ = false, over_ = false;
  std::thread thread_;
};

}  // namespace robot
