"""Chat with a bundle: stream the answer, undo a turn, save the conversation to a file.

python docs/examples/chat.py [BUNDLE]
"""

import sys
import tempfile
from pathlib import Path

import edge


def main(bundle: str = "demo") -> None:
    model = edge.load(bundle)
    session = model.session(system="Answer briefly.", seed=1)

    answer = session.chat("Hello, how are you?", max_tokens=48, temperature=0.7)
    for piece in answer:
        print(piece, end="", flush=True)
    result = answer.result
    print(f"\n[{len(result.tokens)} tokens, ended by {result.finish_reason}]")

    # The state already holds the first turn, so only the new message is run.
    second = session.chat("What did you do today?", max_tokens=48).finish()
    print(f"{second.text}\n[{second.reused_tokens} tokens of the prompt were not run again]")

    # undo copies a state of fixed size and runs no token.
    session.undo()
    assert [message.role for message in session.messages] == ["system", "user", "assistant"]

    # A saved conversation continues in another session, or another process.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "conversation.state"
        session.save(file)
        resumed = model.session()
        restored = resumed.load(file)
        print(f"[{file.stat().st_size:,} bytes on disk, {restored} tokens restored]")
        assert resumed.messages == session.messages


if __name__ == "__main__":
    main(*sys.argv[1:])
