"""A ROS 2 lifecycle node that serves a mamba-edge model."""

from importlib.util import find_spec

if find_spec("edge") is None:
    raise ModuleNotFoundError(
        "mamba-edge is not on this Python's path: export "
        "PYTHONPATH=CHECKOUT/.venv/lib/pythonX.Y/site-packages:$PYTHONPATH if it is installed, "
        "or PYTHONPATH=CHECKOUT:$PYTHONPATH for a checkout (jetson/README.md)",
        name="edge",
    )
