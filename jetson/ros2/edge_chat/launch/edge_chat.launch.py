"""Launch the node, whose lifecycle is then driven by hand or by a manager:

ros2 launch edge_chat edge_chat.launch.py config:=my.yaml namespace:=robot1
ros2 lifecycle set /robot1/edge_chat configure && ros2 lifecycle set /robot1/edge_chat activate

With package:=edge_chat_cpp, the node in C++ (docs/examples/c/ros2).
"""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode


def generate_launch_description() -> LaunchDescription:
    config = Path(get_package_share_directory("edge_chat")) / "config" / "edge_chat.yaml"
    return LaunchDescription(
        [
            DeclareLaunchArgument("config", default_value=str(config)),
            DeclareLaunchArgument("namespace", default_value=""),
            DeclareLaunchArgument("package", default_value="edge_chat"),
            LifecycleNode(
                package=LaunchConfiguration("package"),
                executable="node",
                name="edge_chat",
                namespace=LaunchConfiguration("namespace"),
                output="screen",
                parameters=[LaunchConfiguration("config")],
            ),
        ]
    )
