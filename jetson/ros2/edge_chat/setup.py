from setuptools import setup

setup(
    name="edge_chat",
    version="0.1.0",
    packages=["edge_chat"],
    data_files=[
        ("share/ament_index/resource_index/packages", ["resource/edge_chat"]),
        ("share/edge_chat", ["package.xml"]),
        ("share/edge_chat/launch", ["launch/edge_chat.launch.py"]),
        ("share/edge_chat/config", ["config/edge_chat.yaml"]),
    ],
    install_requires=["setuptools"],
    tests_require=["pytest"],
    zip_safe=True,
    license="Apache-2.0",
    description="A lifecycle node that runs a language model of mamba-edge",
    entry_points={"console_scripts": ["node = edge_chat.node:main"]},
)
