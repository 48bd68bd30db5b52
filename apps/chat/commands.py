"""The commands of a talk: each a word, what may follow it, and a function that says what it did."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from edge.apps.chat import files
from edge.apps.units import megabytes
from edge.errors import InputError
from edge.runtime.engine import title
from edge.runtime.sampling import SamplingParams, make_params

if TYPE_CHECKING:
    from edge.apps.chat.gain import Gain
    from edge.runtime.generate import Generation
    from edge.runtime.result import GenerationResult
    from edge.runtime.session import Session, SessionSnapshot

SETTABLE = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed", "stop"
)  # fmt: skip
_WHOLE = ("top_k", "max_tokens", "seed")


@dataclass
class Talk:
    """What a talk consists of besides its session.

    Attributes:
        name: of the bundle.
        sampling: parameters given on the command line or by /set.
        forks: branches kept by /fork.
        attached: text that /read keeps for the next message.
        figures: whether the line of figures follows an answer.
        last, answers, tokens: of the answers so far: the last one, and sums.
        gain: what drafting gains, where there is any; last_gain: in the last answer.
    """

    session: Session
    name: str
    sampling: dict[str, Any]
    forks: dict[str, SessionSnapshot] = field(default_factory=dict)
    attached: str = ""
    figures: bool = True
    last: GenerationResult | None = None
    answers: int = 0
    tokens: int = 0
    gain: Gain | None = None
    last_gain: float | None = None

    def length(self) -> str:
        if self.session.model.template is None:
            return f"a text of {len(self.session.tokens)} tokens"
        return f"a conversation of {len(self.session.messages)} messages"

    def copied(self) -> str:
        """What going back costs, in words."""
        return f"{megabytes(self.session.snapshot_bytes)} of state copied, nothing run again"


# a command says what it did, or begins an answer
Run = Callable[[Talk, str], "str | Generation"]


@dataclass(frozen=True)
class Command:
    usage: str
    does: str
    run: Run
    words: tuple[str, ...] | None = ()


def _help(talk: Talk, argument: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values()) + 2
    lines = [f"{command.usage:<{width}}{command.does}" for command in COMMANDS.values()]
    return "\n".join(
        [
            *lines,
            '""" begins and ends a message of several lines; Ctrl-G opens an editor.',
            "Ctrl-C stops an answer; again, at the prompt, leaves. Ctrl-D leaves.",
        ]
    )


def _reset(talk: Talk, argument: str) -> str:
    talk.session.reset()
    return "forgotten; /undo brings it back"


def _undo(talk: Talk, argument: str) -> str:
    talk.session.undo()
    return f"taken back; {talk.length()}; {talk.copied()}"


def _regen(talk: Talk, argument: str) -> Generation:
    return talk.session.regenerate(**talk.sampling)


def _fork(talk: Talk, argument: str) -> str:
    name = argument or f"fork{len(talk.forks) + 1}"
    talk.forks[name] = talk.session.snapshot()
    return f"kept as {name}: /load {name} comes back here; {talk.copied()}"


def _save(talk: Talk, argument: str) -> str:
    path = files.ready(files.place("/save", argument))
    talk.session.save(path)
    return f"saved {talk.length()} to {path} ({megabytes(path.stat().st_size)})"


def _load(talk: Talk, argument: str) -> str:
    if argument in talk.forks:
        talk.session.restore(talk.forks[argument], undoable=True)
        return f"back at {argument}: {talk.length()}; {talk.copied()}"
    spared = talk.session.load(files.place("/load", argument))
    return f"took up {talk.length()}: {spared} tokens need not be run again"


def _list(talk: Talk, argument: str) -> str:
    lines = [f"{name:<20} fork of this talk" for name in talk.forks]
    lines += [f"{name:<20} saved {when}, {megabytes(size)}" for name, size, when in files.saved()]
    return "\n".join(lines) or "no forks, nothing saved"


def _system(talk: Talk, argument: str) -> str:
    if talk.session.model.template is None:
        raise InputError("this model has no chat template, so no system message", field="/system")
    talk.session.reset(argument)
    said = "the system message is set" if argument else "there is no system message now"
    return f"{said}, and the conversation begins anew; /undo brings the old one back"


def _set(talk: Talk, argument: str) -> str:
    name, _, value = argument.partition(" ")
    if not name:
        return _parameters(talk)
    if name not in SETTABLE:
        raise InputError(f"there is no {name}", field="/set", remedy=", ".join(SETTABLE))
    changed = talk.sampling | {name: _value(name, value.strip())}
    make_params(talk.session.model.defaults, changed)
    talk.sampling.update(changed)
    return f"{name} {_shown(talk, name)}"


def _value(name: str, text: str) -> Any:
    """The value of a parameter; nothing goes back to the model's own."""
    if not text:
        return None
    try:
        if name == "stop":
            return tuple(shlex.split(text))
        return int(text) if name in _WHOLE else float(text)
    except ValueError:
        kind = "texts" if name == "stop" else "a whole number" if name in _WHOLE else "a number"
        raise InputError(f"{text!r:.40} is not {kind}", field=name) from None


def _shown(talk: Talk, name: str) -> str:
    params = make_params(talk.session.model.defaults, talk.sampling)
    value = getattr(params, name)
    return "none" if value in (None, ()) else f"{value}"


def _parameters(talk: Talk) -> str:
    known = [item.name for item in fields(SamplingParams) if item.name in SETTABLE]
    return "\n".join(f"{name:<20} {_shown(talk, name)}" for name in known)


def _show(talk: Talk, argument: str) -> str:
    session, manifest = talk.session, talk.session.model.manifest
    if argument == "parameters":
        return _parameters(talk)
    if argument == "transcript":
        said = [f"{message.role}: {message.content}" for message in session.messages]
        return "\n".join(said) or "nothing has been said"
    if argument == "system":
        first = session.messages[:1]
        is_system = bool(first) and first[0].role == "system"
        return first[0].content if is_system else "there is no system message"
    if argument:
        raise InputError(f"there is no {argument}", field="/show", remedy=", ".join(SHOWN))
    return "\n".join(
        [
            f"{talk.name}: {manifest.model.family}, {len(manifest.model.layers)} layers, "
            f"{manifest.quantization.recipe}, on {title(session.model.engine)}",
            f"{talk.length()}, {len(session.tokens)} tokens in the state",
            f"state {megabytes(session.state_bytes)}, a copy of it "
            f"{megabytes(session.snapshot_bytes)}, whatever the length",
        ]
    )


SHOWN = ("parameters", "system", "transcript")


def _read(talk: Talk, argument: str) -> str:
    text = files.text_of("/read", argument)
    count = len(talk.session.model.tokenizer.encode(text))
    talk.attached += text.rstrip("\n") + "\n\n"
    return f"{argument}: {count} tokens, part of the next message"


def _stats(talk: Talk, argument: str) -> str:
    if argument in ("on", "off"):
        talk.figures = argument == "on"
        return f"figures {argument}"
    from edge.apps.chat.output import figures

    if talk.last is None:
        return "no answer yet"
    said = [figures(talk.last, talk.session, talk.gain, talk.last_gain)]
    said.append(f"{talk.answers} answers, {talk.tokens} tokens")
    return "\n".join([*said, talk.gain.line()] if talk.gain else said)


def _bye(talk: Talk, argument: str) -> str:
    raise EOFError


COMMANDS = {
    "/help": Command("/help", "this list", _help),
    "/reset": Command("/reset", "forget the conversation", _reset),
    "/undo": Command("/undo", "take back the last turn", _undo),
    "/regen": Command("/regen", "answer the last message again", _regen),
    "/fork": Command("/fork [NAME]", "keep a copy of the conversation to come back to", _fork),
    "/save": Command("/save NAME", "write the conversation, with its state", _save, None),
    "/load": Command("/load NAME", "take up a saved conversation or a fork", _load, None),
    "/list": Command("/list", "forks and saved conversations", _list),
    "/system": Command("/system [TEXT]", "another system message, or none", _system),
    "/set": Command("/set [NAME [VALUE]]", "sampling parameters", _set, SETTABLE),
    "/show": Command("/show [WHAT]", "the model; parameters, system, transcript", _show, SHOWN),
    "/read": Command("/read FILE", "put a text file before the next message", _read, None),
    "/stats": Command("/stats [on|off]", "figures of the last answer, or after each", _stats,
                      ("on", "off")),
    "/bye": Command("/bye", "leave (as /quit, /exit and Ctrl-D do)", _bye),
}  # fmt: skip
# what other programs call them
ALIASES = {"/quit": "/bye", "/exit": "/bye"}
