// What docs/examples/c/ros2/node.cpp uses of rclcpp, declared so that it can be compiled without ROS 2.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace builtin_interfaces::msg {
struct Time {
  int32_t sec;
  uint32_t nanosec;
};
}  // namespace builtin_interfaces::msg

namespace rcl_interfaces::msg {
struct ParameterDescriptor {
  bool dynamic_typing;
};
}  // namespace rcl_interfaces::msg

namespace rclcpp {

enum ParameterType : uint8_t {
  PARAMETER_NOT_SET,
  PARAMETER_BOOL,
  PARAMETER_INTEGER,
  PARAMETER_DOUBLE,
  PARAMETER_STRING
};

class ParameterValue {
 public:
  explicit ParameterValue(bool value);
  explicit ParameterValue(int value);
  explicit ParameterValue(int64_t value);
  explicit ParameterValue(double value);
  explicit ParameterValue(const std::string& value);
  explicit ParameterValue(const char* value);
  ParameterType get_type() const;
};

class Parameter {
 public:
  ParameterType get_type() const;
  int64_t as_int() const;
  double as_double() const;
  const std::string& as_string() const;
  std::string value_to_string() const;
};

class Time {
 public:
  operator builtin_interfaces::msg::Time() const;
};

class Logger {
 public:
  const char* get_name() const;
};
__attribute__((format(printf, 2, 3))) void log_of_stub(const Logger& logger, const char* text, ...);
#define RCLCPP_WARN(logger, ...) rclcpp::log_of_stub(logger, __VA_ARGS__)
#define RCLCPP_ERROR(logger, ...) rclcpp::log_of_stub(logger, __VA_ARGS__)

class Context {
 public:
  using SharedPtr = std::shared_ptr<Context>;
  struct PreShutdownCallbackHandle {};
  PreShutdownCallbackHandle add_pre_shutdown_callback(std::function<void()> callback);
};

class QoS {
 public:
  QoS(size_t depth);
};

class ServiceBase {
 public:
  using SharedPtr = std::shared_ptr<ServiceBase>;
  virtual ~ServiceBase();
};
template <class T> class Service : public ServiceBase {
 public:
  using SharedPtr = std::shared_ptr<Service<T>>;
};

class TimerBase {
 public:
  using SharedPtr = std::shared_ptr<TimerBase>;
};

template <class T> class Publisher {
 public:
  using SharedPtr = std::shared_ptr<Publisher<T>>;
  void publish(const T& message);
};
template <class T, class Node>
std::shared_ptr<Publisher<T>> create_publisher(Node& node, const std::string& topic, const QoS& qos);

namespace node_interfaces {
class NodeBaseInterface {
 public:
  using SharedPtr = std::shared_ptr<NodeBaseInterface>;
  virtual ~NodeBaseInterface();
  virtual Context::SharedPtr get_context() = 0;
};
}  // namespace node_interfaces

void init(int count, char const* const* words);
void spin(node_interfaces::NodeBaseInterface::SharedPtr node);
bool shutdown();

}  // namespace rclcpp
