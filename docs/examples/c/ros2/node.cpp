// The lifecycle node of jetson/ros2/edge_chat in C++, without Python: the same action, services,
// topic and parameter names, so that a client need not know which of the two answers.
//
//   action    ~/generate    edge_chat_msgs/Generate
//   services  ~/reset       edge_chat_msgs/Reset
//             ~/save, ~/load  edge_chat_msgs/StateFile
//   topic     /diagnostics  diagnostic_msgs/DiagnosticArray
//
// Not in it: drafting, GPUs, and, unless it is built with llguidance (CMakeLists.txt), json_schema and
// regex. `bundle` is a folder, and the chat template's text is in parameters. The model has a thread of
// its own; callbacks never wait for a token.
#include <atomic>
#include <chrono>
#include <cmath>
#include <diagnostic_msgs/msg/diagnostic_array.hpp>
#include <edge_chat_msgs/action/generate.hpp>
#include <edge_chat_msgs/srv/reset.hpp>
#include <edge_chat_msgs/srv/state_file.hpp>
#include <future>
#include <map>
#include <rclcpp/rclcpp.hpp>
#include <rclcpp_action/rclcpp_action.hpp>
#include <rclcpp_lifecycle/lifecycle_node.hpp>

#include "../robot_speech.h"

using diagnostic_msgs::msg::DiagnosticArray;
using diagnostic_msgs::msg::DiagnosticStatus;
using edge_chat_msgs::action::Generate;
using edge_chat_msgs::srv::Reset;
using edge_chat_msgs::srv::StateFile;
using Goal = rclcpp_action::ServerGoalHandle<Generate>;
using Returned = rclcpp_lifecycle::node_interfaces::LifecycleNodeInterface::CallbackReturn;
using namespace std::chrono_literals;

class ChatNode : public rclcpp_lifecycle::LifecycleNode {
 public:
  ChatNode() : LifecycleNode("edge_chat") {
    rcl_interfaces::msg::ParameterDescriptor any;  // or 30 for 30.0 in a file would end the process
    any.dynamic_typing = true;
    for (const auto& [name, value] : std::map<std::string, rclcpp::ParameterValue>{
             {"bundle", value_of("")}, {"threads", value_of(1)}, {"max_tokens", value_of(128)},
             {"temperature", value_of(0.7)}, {"top_k", value_of(0)}, {"top_p", value_of(1.0)},
             {"min_p", value_of(0.0)}, {"repetition_penalty", value_of(1.0)},
             {"deadline_s", value_of(30.0)}, {"warmup_tokens", value_of(8)},
             {"diagnostics_s", value_of(1.0)}, {"template_opening", value_of("")},
             {"template_begin", value_of("<|user|>")},
             {"template_end", value_of("<|end|><|assistant|>")},
             {"template_closing", value_of("<|end|>")}})
      declare_parameter(name, value, any);
    actions_ = rclcpp_action::create_server<Generate>(
        this, "~/generate",
        [this](const rclcpp_action::GoalUUID&, Generate::Goal::ConstSharedPtr) { return accept(); },
        [this](std::shared_ptr<Goal>) {
          if (speech_) speech_->stop();
          return rclcpp_action::CancelResponse::ACCEPT;
        },
        [this](std::shared_ptr<Goal> goal) { begin(goal); });
    services_ = {
        create_service<Reset>("~/reset",
                              [this](Reset::Request::SharedPtr, Reset::Response::SharedPtr out) {
                                attempt(out, [this] { speech_->clear(); });
                              }),
        create_service<StateFile>(
            "~/save",
            [this](StateFile::Request::SharedPtr in, StateFile::Response::SharedPtr out) {
              attempt(out, [&] { out->tokens = int32_t(speech_->save(in->path)); });
            }),
        create_service<StateFile>(
            "~/load",
            [this](StateFile::Request::SharedPtr in, StateFile::Response::SharedPtr out) {
              attempt(out, [&] { out->tokens = int32_t(speech_->load(in->path)); });
            })};
    diagnostics_ = rclcpp::create_publisher<DiagnosticArray>(*this, "/diagnostics", 10);
    double period = number("diagnostics_s");
    timer_ = create_wall_timer(std::chrono::duration<double>(period > 0 ? period : 1.0),
                               [this] { diagnose(); });
  }
  ~ChatNode() override { free(); }

  // -- lifecycle --------------------------------------------------------------------------------

  Returned on_configure(const rclcpp_lifecycle::State&) override {
    return transition([this] {
      robot::Template chat;
      chat.opening = text("template_opening"), chat.begin = text("template_begin");
      chat.end = text("template_end"), chat.closing = text("template_closing");
      int threads = int(whole("threads"));
      if (threads == 0) threads = int(std::max(1u, std::thread::hardware_concurrency()));
      speech_ = std::make_unique<robot::Speech>(text("bundle"), chat, threads);
      question_ = robot::Question();
      edge_sampling& how = question_.sampling = speech_->sampling();
      how.temperature = number("temperature"), how.top_k = int32_t(whole("top_k"));
      how.top_p = number("top_p"), how.min_p = number("min_p");
      how.repetition_penalty = number("repetition_penalty");
      question_.max_tokens = whole("max_tokens"), question_.deadline_s = number("deadline_s");
      counts_ = Counts();
    });
  }
  Returned on_activate(const rclcpp_lifecycle::State&) override {
    return transition([this] {
      robot::Question hello = question_;
      hello.text = "Hello", hello.max_tokens = whole("warmup_tokens"), hello.keep = false;
      std::promise<std::string> ended;
      if (hello.max_tokens > 0) {
        speech_->ask(hello, nullptr, [&](const robot::Answer& a) { ended.set_value(a.error); });
        std::string error = ended.get_future().get();
        if (!error.empty()) throw std::runtime_error(error);
        speech_->clear();
      }
      active_ = true;
    });
  }
  Returned on_deactivate(const rclcpp_lifecycle::State&) override {
    return transition([this] { end_goal(); });
  }
  Returned on_cleanup(const rclcpp_lifecycle::State&) override {
    return transition([this] { free(); });
  }
  Returned on_shutdown(const rclcpp_lifecycle::State&) override {
    return transition([this] { free(); });
  }
  // Success here means unconfigured.
  Returned on_error(const rclcpp_lifecycle::State&) override {
    return transition([this] { free(); });
  }
  // Accepts no more goals, and ends the running one.
  void end_goal() {
    active_ = false;
    if (!speech_) return;
    std::unique_lock<std::mutex> lock(mutex_);
    if (answering_) speech_->stop();
    ended_.wait(lock, [this] { return !answering_; });
  }

 private:
  // Publishes the text of an answer, at most 200 times a second: a client keeps the last ten
  // messages until it looks at them, and small models are faster than that.
  class Feedback {
   public:
    explicit Feedback(std::shared_ptr<Goal> goal) : goal_(std::move(goal)) {}
    void add(const std::string& piece) {
      text_ += piece;
      if (Clock::now() - last_ >= 5ms) publish();
    }
    void publish() {
      if (text_.empty()) return;
      auto message = std::make_shared<Generate::Feedback>();
      message->piece.swap(text_);
      goal_->publish_feedback(message);
      last_ = Clock::now();
    }

   private:
    using Clock = std::chrono::steady_clock;
    std::shared_ptr<Goal> goal_;
    std::string text_;
    Clock::time_point last_;
  };
  struct Counts {
    int64_t answers = 0, cancelled = 0, errors = 0;
    robot::Answer last;
  };

  template <class T> static rclcpp::ParameterValue value_of(T value) {
    return rclcpp::ParameterValue(value);
  }
  // Each throws std::runtime_error that names a parameter of another type.
  std::string text(const char* name) const {
    auto value = get_parameter(name);
    if (value.get_type() == rclcpp::PARAMETER_STRING) return value.as_string();
    throw std::runtime_error(std::string(name) + ": must be a string: set the node's parameter");
  }
  double number(const char* name) const {
    auto value = get_parameter(name);
    if (value.get_type() == rclcpp::PARAMETER_DOUBLE) return value.as_double();
    if (value.get_type() == rclcpp::PARAMETER_INTEGER) return double(value.as_int());
    throw std::runtime_error(std::string(name) + ": must be a number: set the node's parameter");
  }
  int64_t whole(const char* name) const {
    auto value = get_parameter(name);
    if (value.get_type() == rclcpp::PARAMETER_INTEGER) return value.as_int();
    throw std::runtime_error(std::string(name) + ": must be an integer: set the node's parameter");
  }

  template <class F> Returned transition(F change) {
    try {
      change();
      return Returned::SUCCESS;
    } catch (const std::exception& problem) {
      RCLCPP_ERROR(get_logger(), "%s", problem.what());
      return Returned::FAILURE;
    }
  }
  void free() {
    end_goal();
    speech_.reset();
  }

  // -- goals ------------------------------------------------------------------------------------

  // Why a goal or a request would be refused now; empty if it would not.
  std::string refusal() {
    std::lock_guard<std::mutex> lock(mutex_);
    return !active_ ? "is not active" : answering_ ? "is answering another goal" : "";
  }
  rclcpp_action::GoalResponse accept() {
    std::string reason = refusal();
    if (reason.empty()) return rclcpp_action::GoalResponse::ACCEPT_AND_EXECUTE;
    RCLCPP_WARN(get_logger(), "rejected a goal: the node %s", reason.c_str());
    return rclcpp_action::GoalResponse::REJECT;
  }
  void begin(std::shared_ptr<Goal> goal) {
    const Generate::Goal& asked = *goal->get_goal();
    robot::Answer refused;
    refused.error = refusal();  // another goal was accepted at the same moment
    if (!refused.error.empty()) return end(goal, refused);
    robot::Question question = question_;
    question.text = asked.prompt, question.chat = asked.chat, question.keep = asked.keep;
    question.stop = asked.stop, question.choices = asked.choices;
    question.json_schema = asked.json_schema, question.regex = asked.regex;
    if (asked.max_tokens > 0) question.max_tokens = asked.max_tokens;
    if (asked.temperature >= 0) question.sampling.temperature = asked.temperature;
    if (asked.seed >= 0) question.sampling.has_seed = 1, question.sampling.seed = uint64_t(asked.seed);
    if (asked.deadline_s >= 0) question.deadline_s = asked.deadline_s;
    answering_ = true;
    auto feedback = std::make_shared<Feedback>(goal);
    speech_->ask(
        question, [feedback](const std::string& piece) { feedback->add(piece); },
        [this, goal, feedback](const robot::Answer& answer) {
          count(answer);
          try {
            feedback->publish();
            end(goal, answer);
          } catch (const std::exception& problem) {  // the context is shutting down
            RCLCPP_WARN(get_logger(), "%s", problem.what());
          }
          std::lock_guard<std::mutex> lock(mutex_);
          answering_ = false;
          ended_.notify_all();
        });
  }
  void end(const std::shared_ptr<Goal>& goal, const robot::Answer& answer) {
    static const char* const finishes[] = {"stop", "length", "cancelled", "deadline", "context"};
    auto result = std::make_shared<Generate::Result>();
    result->text = answer.text, result->error = answer.error;
    result->finish_reason = answer.error.empty() ? finishes[answer.finish] : "error";
    result->prompt_tokens = int32_t(answer.prompt_tokens), result->tokens = int32_t(answer.tokens);
    result->reused_tokens = int32_t(answer.reused_tokens);
    result->ttft_s = float(answer.ttft_s), result->tokens_per_s = float(answer.tokens_per_s);
    // a goal is in the state of cancelling only after the callback that stops the answer
    for (int i = 0; i < 1000 && answer.finish == EDGE_FINISH_CANCELLED && active_; i++) {
      if (goal->is_canceling()) break;
      std::this_thread::sleep_for(1ms);
    }
    if (goal->is_canceling()) return goal->canceled(result);
    bool failed = !answer.error.empty() || answer.finish == EDGE_FINISH_CANCELLED;
    failed ? goal->abort(result) : goal->succeed(result);
  }
  void count(const robot::Answer& answer) {
    std::lock_guard<std::mutex> lock(mutex_);
    counts_.answers++;
    counts_.cancelled += answer.error.empty() && answer.finish == EDGE_FINISH_CANCELLED;
    counts_.errors += !answer.error.empty();
    counts_.last = answer;
    if (!answer.error.empty()) RCLCPP_ERROR(get_logger(), "%s", answer.error.c_str());
  }

  // -- services and diagnostics -----------------------------------------------------------------

  template <class Response, class F> void attempt(Response& out, F work) {
    std::string reason = refusal();
    try {
      if (!reason.empty()) throw std::runtime_error("the node " + reason);
      work();
      out->success = true;
    } catch (const std::exception& problem) {
      out->message = problem.what();
    }
  }
  void diagnose() {
    DiagnosticArray array;
    array.header.stamp = now();
    array.status.resize(1);
    DiagnosticStatus& status = array.status[0];
    std::lock_guard<std::mutex> lock(mutex_);
    status.name = std::string(get_name()) + ": language model";
    status.hardware_id = speech_ ? "cpu" : "";
    status.level = DiagnosticStatus::OK;
    status.message = active_ ? "active" : speech_ ? "inactive" : "unconfigured";
    auto add = [&](const char* key, const std::string& value) {
      status.values.emplace_back();
      status.values.back().key = key, status.values.back().value = value;
    };
    auto figure = [](double value) { return std::isnan(value) ? "" : std::to_string(value); };
    add("bundle", get_parameter("bundle").value_to_string());
    add("engine", status.hardware_id);
    add("answers", std::to_string(counts_.answers));
    add("cancelled", std::to_string(counts_.cancelled));
    add("errors", std::to_string(counts_.errors));
    add("tokens_per_s", figure(counts_.last.tokens_per_s));
    add("ttft_s", figure(counts_.last.ttft_s));
    diagnostics_->publish(array);
  }

  std::unique_ptr<robot::Speech> speech_;
  robot::Question question_;  // a goal's, where it leaves things to the node
  std::mutex mutex_;          // for what the thread that answers changes
  std::condition_variable ended_;
  Counts counts_;
  bool answering_ = false;
  std::atomic<bool> active_{false};
  rclcpp_action::Server<Generate>::SharedPtr actions_;
  std::vector<rclcpp::ServiceBase::SharedPtr> services_;
  rclcpp::Publisher<DiagnosticArray>::SharedPtr diagnostics_;
  rclcpp::TimerBase::SharedPtr timer_;
};

int main(int count, char** words) {
  rclcpp::init(count, words);
  auto node = std::make_shared<ChatNode>();
  // a goal must end while its server can still say so: its handle throws when it is destroyed later
  node->get_node_base_interface()->get_context()->add_pre_shutdown_callback(
      [&node] { node->end_goal(); });
  rclcpp::spin(node->get_node_base_interface());
  rclcpp::shutdown();
}
