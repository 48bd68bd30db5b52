// What docs/examples/c/ros2/node.cpp uses of diagnostic_msgs.
#pragma once

#include <rclcpp/rclcpp.hpp>
#include <string>
#include <vector>

namespace std_msgs::msg {
struct Header {
  builtin_interfaces::msg::Time stamp;
  std::string frame_id;
};
}  // namespace std_msgs::msg

namespace diagnostic_msgs::msg {

struct KeyValue {
  std::string key, value;
};
struct DiagnosticStatus {
  static constexpr unsigned char OK = 0, WARN = 1, ERROR = 2, STALE = 3;
  unsigned char level;
  std::string name, message, hardware_id;
  std::vector<KeyValue> values;
};
struct DiagnosticArray {
  std_msgs::msg::Header header;
  std::vector<DiagnosticStatus> status;
};

}  // namespace diagnostic_msgs::msg
