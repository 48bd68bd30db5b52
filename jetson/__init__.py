"""What proves the runtime on a Jetson. The rest of this folder is shell, Docker, systemd, ROS 2."""
