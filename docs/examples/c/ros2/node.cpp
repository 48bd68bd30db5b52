// A ROS 2 node that answers. Each message on `ask` is a turn. The answer is published piece by
// piece on `text`, its finish reason on `done`; the service `stop` ends it within a token. Unproven:
// never run. The package edge_chat (jetson/ros2) is the node in Python, with actions and diagnostics.
//
//   colcon build --packages-select edge_speech && ros2 run edge_speech node --ros-args -p bundle:=…
#include <rclcpp/rclcpp.hpp>
#include <std_msgs/msg/string.hpp>
#include <std_srvs/srv/trigger.hpp>

#include "../robot_speech.h"

using std_msgs::msg::String;
using std_srvs::srv::Trigger;

class SpeechNode : public rclcpp::Node {
 public:
  SpeechNode() : Node("edge_speech") {
    auto text = create_publisher<String>("text", 100);
    auto done = create_publisher<String>("done", 10);
    auto send = [](auto& publisher, const std::string& data) {
      String message;
      message.data = data;
      publisher->publish(message);
    };
    robot::Manner manner;
    manner.deadline_s = declare_parameter("deadline_s", manner.deadline_s);
    manner.temperature = declare_parameter("temperature", manner.temperature);
    manner.begin = declare_parameter("turn_begin", manner.begin);
    manner.end = declare_parameter("turn_end", manner.end);
    speech_ = std::make_unique<robot::Speech>(
        declare_parameter("bundle", ""), manner,
        [=](const std::string& piece) { send(text, piece); },
        [=](edge_finish finish, const std::string& error) {
          static const char* const names[] = {"stop", "length", "cancelled", "deadline", "context"};
          send(done, error.empty() ? names[finish] : "error: " + error);
        });
    ask_ = create_subscription<String>("ask", 10, [this](String::ConstSharedPtr message) {
      if (!speech_->ask(message->data)) RCLCPP_WARN(get_logger(), "busy: a question is dropped");
    });
    stop_ = create_service<Trigger>(
        "stop", [this](Trigger::Request::SharedPtr, Trigger::Response::SharedPtr response) {
          speech_->stop();
          response->success = true;
        });
  }

 private:
  std::unique_ptr<robot::Speech> speech_;
  rclcpp::Subscription<String>::SharedPtr ask_;
  rclcpp::Service<Trigger>::SharedPtr stop_;
};

int main(int count, char** words) {
  rclcpp::init(count, words);
  try {
    rclcpp::spin(std::make_shared<SpeechNode>());
  } catch (const std::exception& problem) {  // a missing or damaged bundle
    RCLCPP_FATAL(rclcpp::get_logger("edge_speech"), "%s", problem.what());
    return 1;
  }
  rclcpp::shutdown();
}
