// What docs/examples/c/ros2/node.cpp uses of rclcpp_lifecycle.
#pragma once

#include <rclcpp/rclcpp.hpp>

namespace rclcpp_lifecycle {

class State {
 public:
  uint8_t id() const;
};

namespace node_interfaces {
class LifecycleNodeInterface {
 public:
  enum class CallbackReturn : uint8_t { SUCCESS, FAILURE, ERROR };
  virtual ~LifecycleNodeInterface();
  virtual CallbackReturn on_configure(const State& previous);
  virtual CallbackReturn on_cleanup(const State& previous);
  virtual CallbackReturn on_shutdown(const State& previous);
  virtual CallbackReturn on_activate(const State& previous);
  virtual CallbackReturn on_deactivate(const State& previous);
  virtual CallbackReturn on_error(const State& previous);
};
}  // namespace node_interfaces

class LifecycleNode : public node_interfaces::LifecycleNodeInterface,
                      public std::enable_shared_from_this<LifecycleNode> {
 public:
  explicit LifecycleNode(const std::string& name);
  const char* get_name() const;
  rclcpp::Logger get_logger() const;
  rclcpp::Time now() const;
  const rclcpp::ParameterValue& declare_parameter(
      const std::string& name, const rclcpp::ParameterValue& value,
      const rcl_interfaces::msg::ParameterDescriptor& descriptor);
  rclcpp::Parameter get_parameter(const std::string& name) const;
  template <class T>
  typename rclcpp::Service<T>::SharedPtr create_service(
      const std::string& name,
      std::function<void(std::shared_ptr<typename T::Request>, std::shared_ptr<typename T::Response>)>
          callback);
  rclcpp::TimerBase::SharedPtr create_wall_timer(std::chrono::duration<double> period,
                                                 std::function<void()> callback);
  rclcpp::node_interfaces::NodeBaseInterface::SharedPtr get_node_base_interface();
};

}  // namespace rclcpp_lifecycle
