// Generates answers in a thread of its own, for a program whose loop never waits. Needs no ROS:
// robot_speech.cpp runs it in a terminal, ros2/node.cpp in a node.
//
// With -DROBOT_FORMS, answers also keep to a JSON schema or a regex, by llguidance: see forms.h.
#pragma once

#include <edge.h>

#ifdef ROBOT_FORMS
#include "forms.h"
#endif

#include <condition_variable>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace robot {

// Text that the model's chat template writes. Its special tokens become their ids.
struct Template {
  std::string opening;              // at the beginning of a conversation, such as a system message
  std::string begin = "<|user|>";   // before a message
  std::string end = "<|end|><|assistant|>";  // after it
  std::string closing = "<|end|>";  // after an answer, before the next message
};

struct Question {
  std::string text;
  bool chat = true;  // a message; false: a text to continue
  bool keep = true;  // continue the conversation; false: begin a new one
  edge_sampling sampling = EDGE_SAMPLING;
  int64_t max_tokens = 256;
  double deadline_s = 0;  // 0: none
  std::vector<std::string> stop;     // texts that end the answer
  // The answer's form, one at most: one of these texts, JSON of a schema, text that matches.
  std::vector<std::string> choices;
  std::string json_schema, regex;
};

struct Answer {
  std::string text, error;  // `error` is empty on success
  edge_finish finish = EDGE_FINISH_STOP;
  int64_t prompt_tokens = 0;  // run before the first token was sampled
  int64_t reused_tokens = 0;  // held by the state already
  int64_t tokens = 0;
  double ttft_s = std::numeric_limits<double>::quiet_NaN();        // without a token: NaN
  double tokens_per_s = std::numeric_limits<double>::quiet_NaN();  // with fewer than two: NaN
};

class Speech {
 public:
  // Both are called in the thread that answers.
  using Heard = std::function<void(const std::string& piece)>;
  using Done = std::function<void(const Answer&)>;

  // Loads the bundle. Throws std::runtime_error.
  explicit Speech(const std::string& bundle, Template chat = {}, int threads = 1)
      : chat_(std::move(chat)) {
    edge_error error;
    edge_bundle* opened = nullptr;
    check(edge_bundle_open(bundle.c_str(), &opened, &error), error);
    bundle_.reset(opened);
    check(edge_bundle_info(opened, &info_, &error), error);
    edge_model_options of_model = EDGE_MODEL_OPTIONS;
    of_model.threads = threads;
    edge_model* model = nullptr;
    check(edge_model_load(opened, &of_model, &model, &error), error);
    edge_session* session = nullptr;
    edge_status status = edge_session_new(model, nullptr, &session, &error);
    edge_model_close(model);  // the session keeps it open
    check(status, error);
    session_.reset(session);
    thread_ = std::thread([this] { work(); });
  }

  // Ends the answer in progress.
  ~Speech() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    changed_.notify_one();
    edge_session_cancel(session_.get());
    thread_.join();
  }

  // Returns the bundle's sampling parameters.
  edge_sampling sampling() const {
    edge_error error;
    edge_sampling out = EDGE_SAMPLING;
    check(edge_bundle_sampling(bundle_.get(), &out, &error), error);
    return out;
  }

  // Returns false while an answer is in progress. Never waits for the model.
  bool ask(Question question, Heard heard, Done done) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (busy_) return false;
    busy_ = true;
    next_ = Request{std::move(question), std::move(heard), std::move(done)};
    changed_.notify_one();
    return true;
  }
  bool busy() {
    std::lock_guard<std::mutex> lock(mutex_);
    return busy_;
  }

  // Ends the answer in progress within a token, or a chunk of its prompt.
  void stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (busy_) edge_session_cancel(session_.get());
  }

  // Forgets, saves and resumes the conversation. They throw std::runtime_error, also while an answer
  // is in progress. The last two return the number of its tokens.
  void clear() { between([](auto* session, auto* error) { return edge_session_clear(session, error); }); }
  int64_t save(const std::string& path) {
    return between([&](auto* session, auto* error) {
      return edge_session_save(session, path.c_str(), error);
    });
  }
  int64_t load(const std::string& path) {
    return between([&](auto* session, auto* error) {
      return edge_session_load(session, path.c_str(), error);
    });
  }

 private:
  template <class T, void (*End)(T*)>
  struct Ends {
    void operator()(T* handle) const { End(handle); }
  };
  template <class T, void (*End)(T*)>
  using Owned = std::unique_ptr<T, Ends<T, End>>;
  using Decoder = Owned<edge_decoder, edge_decoder_free>;
  using Ids = std::vector<int32_t>;

  struct Request {
    Question question;
    Heard heard;
    Done done;
  };
  // Collects the text of an answer.
  struct Listener {
    edge_decoder* decoder;
    const Heard& heard;
    std::string text;
    int32_t stopped = 0;  // a stop text was found

    void take(const char* piece) {
      if (!*piece) return;
      text += piece;
      if (heard) heard(piece);
    }
    int feed(int32_t token) {
      const char* piece = "";
      if (edge_decoder_feed(decoder, token, &piece, nullptr, &stopped, nullptr)) return 1;
      take(piece);
      return stopped;
    }
  };

  // What an answer keeps to. Throws std::runtime_error.
  struct Form {
    virtual ~Form() = default;
    virtual void begin(edge_constraint& constraint) = 0;  // before every answer
  };
  struct Choices : Form {
    Choices(const edge_bundle* bundle, const std::vector<std::string>& texts) {
      std::vector<const char*> every = pointers(texts);
      edge_error error;
      edge_choices* made = nullptr;
      check(edge_choices_new(bundle, every.data(), every.size(), &made, &error), error);
      choices.reset(made);
    }
    void begin(edge_constraint& constraint) override {
      edge_error error;
      check(edge_choices_begin(choices.get(), &constraint, &error), error);
    }
    Owned<edge_choices, edge_choices_free> choices;
  };
#ifdef ROBOT_FORMS
  struct Matched : Form {
    Matched(const LlgTokenizer* tokenizer, const char* kind, const std::string& source) {
      char problem[1024];
      matcher.reset(forms_matcher(tokenizer, kind, source.c_str(), problem, sizeof problem));
      if (!matcher) throw std::runtime_error(std::string(kind) + ": " + problem);
    }
    void begin(edge_constraint& constraint) override {
      if (llg_matcher_reset(matcher.get())) throw std::runtime_error("llguidance cannot begin again");
      constraint.allow = forms_allow, constraint.accept = forms_accept;
      constraint.user = matcher.get();
    }
    Owned<LlgMatcher, llg_free_matcher> matcher;
  };
  // Rules white space out, as in Python: where it may stand, a small model may write nothing else.
  static std::string compact(const std::string& schema) {
    size_t at = schema.find('{');
    bool object = at != std::string::npos && schema.find_first_not_of(" \t\r\n") == at;
    if (!object || schema.find("\"x-guidance\"") != std::string::npos) return schema;
    size_t next = schema.find_first_not_of(" \t\r\n", at + 1);
    bool empty = next != std::string::npos && schema[next] == '}';
    std::string layout =
        R"("x-guidance": {"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "})";
    return schema.substr(0, at + 1) + layout + (empty ? "" : ",") + schema.substr(at + 1);
  }
#endif

  std::unique_ptr<Form> form_of(const Question& question) {
    bool schema = !question.json_schema.empty(), regex = !question.regex.empty();
    if (!question.choices.empty() + schema + regex > 1)
      throw std::runtime_error("choices, json_schema and regex exclude each other: give one");
    if (!question.choices.empty()) return std::make_unique<Choices>(bundle_.get(), question.choices);
    if (!schema && !regex) return nullptr;
#ifdef ROBOT_FORMS
    char problem[1024];
    if (!tokenizer_) tokenizer_.reset(forms_tokenizer(bundle_.get(), problem, sizeof problem));
    if (!tokenizer_) throw std::runtime_error(std::string("tokenizer: ") + problem);
    return std::make_unique<Matched>(tokenizer_.get(), schema ? "json_schema" : "regex",
                                     schema ? compact(question.json_schema) : question.regex);
#else
    throw std::runtime_error("json_schema and regex need llguidance: build with -DROBOT_FORMS");
#endif
  }

  static void check(edge_status status, const edge_error& error) {
    if (!status) return;
    std::string where;
    for (const char* part : {error.file, error.field})  // either may be empty
      if (*part) where += std::string(part) + ": ";
    throw std::runtime_error(where + error.message);
  }
  static std::vector<const char*> pointers(const std::vector<std::string>& texts) {
    std::vector<const char*> out;
    for (const std::string& text : texts) out.push_back(text.c_str());
    return out;
  }

  template <class F> int64_t between(F work) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (busy_) throw std::runtime_error("an answer is in progress");
    edge_error error;
    check(work(session_.get(), &error), error);
    return edge_session_position(session_.get());
  }

  Ids encoded(const std::vector<edge_part>& parts) const {
    edge_error error;
    size_t count = 0;
    Ids out(64);
    for (;;) {
      check(edge_bundle_prompt(bundle_.get(), parts.data(), parts.size(), out.data(), out.size(),
                               &count, &error),
            error);
      bool whole = count <= out.size();
      out.resize(count);
      if (whole) return out;
    }
  }
  static edge_part part(const std::string& text, bool trusted) {
    return {text.data(), text.size(), trusted};
  }

  // The ids that follow what the session holds. User input is an untrusted part of its own, so that
  // nobody can inject control tokens.
  Ids prompt(const Question& question) const {
    int32_t last = edge_session_pending(session_.get());
    bool fresh = edge_session_position(session_.get()) == 0 && last < 0;
    Ids out;
    auto add = [&](const Ids& ids, bool skip = false) {
      out.insert(out.end(), ids.begin() + skip, ids.end());
    };
    if (fresh && info_.add_bos) out.push_back(info_.bos);
    if (!question.chat) {
      add(encoded({part(question.text, false)}));
      return out;
    }
    if (!fresh) {
      Ids closing = encoded({part(chat_.closing, true)});
      add(closing, !closing.empty() && closing[0] == last);  // the model may have ended its answer
    }
    add(encoded({part(fresh ? chat_.opening : "", true), part(chat_.begin, true),
                 part(question.text, false), part(chat_.end, true)}));
    return out;
  }

  Answer answer(const Request& request) {
    const Question& question = request.question;
    edge_error error;
    std::vector<const char*> stop = pointers(question.stop);
    edge_decoder_options of_decoder = EDGE_DECODER_OPTIONS;
    of_decoder.stop = stop.data(), of_decoder.stop_count = stop.size();
    of_decoder.continued = !question.chat;
    edge_decoder* decoder = nullptr;
    check(edge_decoder_new(bundle_.get(), &of_decoder, &decoder, &error), error);
    Decoder owned(decoder);
    edge_constraint constraint = EDGE_CONSTRAINT;
    std::unique_ptr<Form> form = form_of(question);
    edge_generation how = EDGE_GENERATION;
    if (form) how.constraint = &constraint;
    Listener listener{decoder, request.heard, {}};
    how.sampling = &question.sampling;
    how.max_tokens = question.max_tokens;
    how.deadline_s = question.deadline_s;
    how.user = &listener;
    how.on_token = [](void* self, int32_t token) { return static_cast<Listener*>(self)->feed(token); };

    edge_result result = EDGE_RESULT;
    Answer out;
    if (!question.keep) check(edge_session_clear(session_.get(), &error), error);
    auto run = [&] {
      if (form) form->begin(constraint);
      Ids ids = prompt(question);
      out.reused_tokens = edge_session_position(session_.get());
      return edge_generate(session_.get(), ids.data(), ids.size(), &how, &result, &error);
    };
    edge_status status = run();
    if (status == EDGE_ERROR_CONTEXT_FULL) {  // forget the earlier conversation
      check(edge_session_clear(session_.get(), &error), error);
      status = run();
    }
    const char* rest = "";
    edge_decoder_finish(decoder, &rest, nullptr, nullptr);
    if (!listener.stopped) listener.take(rest);
    check(status, error);
    out.text = std::move(listener.text);
    out.finish = listener.stopped ? EDGE_FINISH_STOP : result.finish;
    out.prompt_tokens = result.prompt_tokens;
    out.tokens = result.tokens;
    if (out.tokens > 0) out.ttft_s = result.prompt_s;
    if (out.tokens > 1) out.tokens_per_s = double(out.tokens - 1) / (result.total_s - result.prompt_s);
    return out;
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return over_ || next_; });
      if (over_ && !next_) return;
      Request request = std::move(*next_);
      next_.reset();
      lock.unlock();
      Answer ended;
      try {
        ended = answer(request);
      } catch (const std::exception& caught) {
        ended.error = caught.what();
      }
      lock.lock();
      if (!over_) edge_session_resume(session_.get());  // drop a stop that came too late
      busy_ = false;
      lock.unlock();
      request.done(ended);
      lock.lock();
    }
  }

  Template chat_;
  edge_info info_ = EDGE_INFO;
  Owned<edge_bundle, edge_bundle_close> bundle_;
#ifdef ROBOT_FORMS
  Owned<LlgTokenizer, llg_free_tokenizer> tokenizer_;  // made for the first form
#endif
  Owned<edge_session, edge_session_free> session_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Request> next_;
  bool busy_ = false, over_ = false;
  std::thread thread_;
};

}  // namespace robot
