// What docs/examples/c/ros2/node.cpp uses of rclcpp_action.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace rclcpp_action {

using GoalUUID = std::array<uint8_t, 16>;
enum class GoalResponse : int8_t { REJECT, ACCEPT_AND_EXECUTE, ACCEPT_AND_DEFER };
enum class CancelResponse : int8_t { REJECT, ACCEPT };

template <class Action> class ServerGoalHandle {
 public:
  std::shared_ptr<const typename Action::Goal> get_goal() const;
  void publish_feedback(std::shared_ptr<typename Action::Feedback> message);
  bool is_canceling() const;
  void abort(std::shared_ptr<typename Action::Result> result);
  void succeed(std::shared_ptr<typename Action::Result> result);
  void canceled(std::shared_ptr<typename Action::Result> result);
};

template <class Action> class Server {
 public:
  using SharedPtr = std::shared_ptr<Server<Action>>;
  using GoalCallback =
      std::function<GoalResponse(const GoalUUID&, std::shared_ptr<const typename Action::Goal>)>;
  using CancelCallback = std::function<CancelResponse(std::shared_ptr<ServerGoalHandle<Action>>)>;
  using AcceptedCallback = std::function<void(std::shared_ptr<ServerGoalHandle<Action>>)>;
};

template <class Action, class Node>
typename Server<Action>::SharedPtr create_server(
    Node node, const std::string& name, typename Server<Action>::GoalCallback handle_goal,
    typename Server<Action>::CancelCallback handle_cancel,
    typename Server<Action>::AcceptedCallback handle_accepted);

}  // namespace rclcpp_action
