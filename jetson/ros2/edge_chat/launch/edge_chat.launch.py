"""The node, taken through its lifecycle by hand or by a manager:

ros2 launch edge_chat edge_chat.launch.py config:=my.yaml
ros2 lifecycle set /edge_chat configure && ros2 lifecycle set /edge_chat activate
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
            LifecycleNode(
                package="edge_chat",
                executable="node",
                name="edge_chat",
                namespace="",
                output="screen",
                parameters=[LaunchConfiguration("config")],
            ),
        ]
    )
