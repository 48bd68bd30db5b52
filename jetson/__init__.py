"""Verification of the runtime on a Jetson. The rest here is shell, Docker, systemd and ROS 2."""
