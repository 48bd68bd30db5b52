"""Let a model steer a robot with constrained answers: choices, a deadline, a cancel, a tool.

python docs/examples/robot_tools.py [BUNDLE]

A state machine asks the model whenever the choice is the model's. Each question lists its valid
answers, so there is nothing to parse and nothing to misread. The choice that the robot waits for
has a deadline, and a default if that passes. Needs the extra `constrain`.
"""

import sys
import threading
from enum import Enum

import edge

DRIVE = {
    "name": "drive",
    "description": "Drive on, and say how far.",
    "parameters": {
        "type": "object",
        "properties": {
            "direction": {"enum": ["left", "right", "ahead"]},
            "cm": {"type": "integer", "minimum": 1, "maximum": 200},
        },
        "required": ["direction", "cm"],
    },
}


class State(Enum):
    LOOK = "look"
    DRIVE = "drive"
    REPORT = "report"
    REST = "rest"


class Robot:
    def __init__(self, model: edge.Model) -> None:
        self.session = model.session(seed=1)
        self.calm = self.session.snapshot()
        # a tiny model's reports end too soon to be interrupted: forbid the tokens that end them
        self.endless = dict.fromkeys(model.tokenizer.eos, -1e4)

    def look(self) -> State:
        """Choose what to do next; rest if no choice comes in time."""
        self.session.restore(self.calm)
        options = [State.DRIVE.value, State.REST.value]
        said = self.session.chat(
            "A ball lies ahead. What now?", choices=options, temperature=0, deadline_s=30
        ).finish()
        return State(said.text) if said.finish_reason == "stop" else State.REST

    def drive(self) -> State:
        """Call the only tool; its arguments match the schema, whatever the model is."""
        answer = self.session.chat(
            "Go there.", tools=[DRIVE], tool_choice="drive", max_tokens=100
        ).finish()
        for call in answer.tool_calls:
            far, way = call.arguments["cm"], call.arguments["direction"]
            assert 1 <= far <= 200 and way in ("left", "right", "ahead")
            print(f"driving {far} cm {way}")
            # … command motors …
            result = {"role": "tool", "content": "arrived", "tool_call_id": call.id}
            self.session.chat(
                [*self.session.messages, result], tools=[DRIVE], max_tokens=8
            ).finish()
        return State.REPORT

    def report(self) -> State:
        """Talk until something more important comes up."""
        bumper = threading.Timer(0.3, self.session.cancel)  # any thread may cancel, at any time
        bumper.start()
        said = self.session.chat(
            "Tell me all.", max_tokens=1_000_000, logit_bias=self.endless
        ).finish()
        bumper.cancel()
        print(f"the report ended by {said.finish_reason}")
        return State.REST


def main(bundle: str = "demo-draft") -> None:
    # demo-draft has only Mamba layers: no context ever fills, so only the cancel ends its report
    robot = Robot(edge.load(bundle))
    steps = {State.DRIVE: robot.drive, State.REPORT: robot.report}
    choice = robot.look()
    print(f"chose {choice.value}")
    state = State.DRIVE  # whatever the choice, so that the example shows every state
    while state is not State.REST:
        state = steps[state]()
        print(f"next: {state.value}")


if __name__ == "__main__":
    main(*sys.argv[1:])
