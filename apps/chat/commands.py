"""Commands of a conversation: a word, its arguments, and a function that says what it did."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from itertools import count
from typing import TYPE_CHECKING, Any

from edge.apps.chat import files
from edge.apps.chat.context import described
from edge.apps.units import megabytes
from edge.errors import InputError
from edge.runtime.engines import title
from edge.runtime.parameters import SamplingParams, make_params

if TYPE_CHECKING:
    from edge.apps.chat.gain import Gain
    from edge.runtime.generate import Generation
    from edge.runtime.result import GenerationResult
    from edge.runtime.session import Session, SessionSnapshot

NOTHING = '""'  # an empty argument, as in a shell
SETTABLE = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed", "stop"
)  # fmt: skip
_INTEGERS = ("top_k", "max_tokens", "seed")


@dataclass
class Chat:
    """A session, and the other state of a conversation.

    Attributes:
        name: name of the bundle.
        sampling: parameters given on the command line or by /set.
        forks: snapshots kept by /fork.
        attached: text that /read keeps for the next message.
        figures: whether a line of figures follows each answer.
        drops: whether the oldest turns are dropped when the context is full.
        last, answers, tokens: the last answer, the number of answers, and their tokens.
        gain: estimated speed-up by drafting, None without a drafter; last_gain: of the last answer.
    """

    session: Session
    name: str
    sampling: dict[str, Any]
    forks: dict[str, SessionSnapshot] = field(default_factory=dict)
    attached: str = ""
    figures: bool = True
    drops: bool = True
    last: GenerationResult | None = None
    answers: int = 0
    tokens: int = 0
    gain: Gain | None = None
    last_gain: float | None = None

    def add(self, result: GenerationResult) -> None:
        """Count an answer."""
        self.last = result
        self.answers, self.tokens = self.answers + 1, self.tokens + len(result.tokens)
        self.last_gain = self.gain.add(result) if self.gain else None

    def length(self) -> str:
        if self.session.model.template is None:
            return f"a text of {self.session.position} tokens"
        count = len(self.session.messages)
        return f"a conversation of {count} message{'' if count == 1 else 's'}"

    def copied(self) -> str:
        """Describe what going back costs."""
        return f"{megabytes(self.session.snapshot_bytes)} of state copied, nothing recomputed"


# a command returns what it did, or starts an answer
Run = Callable[[Chat, str], "str | Generation"]


@dataclass(frozen=True)
class Command:
    """Command of a conversation.

    Attributes:
        words: arguments it takes.
        path: whether it takes a file.
        kept: whether it takes a fork or a saved conversation.
    """

    usage: str
    does: str
    run: Run
    words: tuple[str, ...] = ()
    path: bool = False
    kept: bool = False


def _help(this: Chat, argument: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values()) + 2
    lines = [f"{command.usage:<{width}}{command.does}" for command in COMMANDS.values()]
    return "\n".join(
        [
            *lines,
            '""" begins and ends a message of several lines; Ctrl-G opens an editor.',
            "Ctrl-C stops an answer; again, at an empty prompt, leaves. Ctrl-D leaves.",
        ]
    )


def _reset(this: Chat, argument: str) -> str:
    this.session.reset()
    return "cleared; /undo brings the conversation back"


def _undo(this: Chat, argument: str) -> str:
    this.session.undo()
    return f"undone; {this.length()}; {this.copied()}"


def _fork(this: Chat, argument: str) -> str:
    candidates = (f"fork{number}" for number in count(1))
    name = argument or next(
        name for name in candidates if name not in this.forks and not files.is_saved(name)
    )
    if files.is_saved(name):
        raise InputError(
            f"{name} is a saved conversation", field="/fork", remedy="choose another name"
        )
    this.forks[name] = this.session.snapshot()
    return f"forked as {name}; /load {name} returns here; {this.copied()}"


def _save(this: Chat, argument: str) -> str:
    if argument in this.forks:
        raise InputError(f"{argument} is a fork", field="/save", remedy="choose another name")
    path = files.ready(files.named("/save", argument))
    this.session.save(path)
    return f"saved {this.length()} to {path} ({megabytes(path.stat().st_size)})"


def _load(this: Chat, argument: str) -> str:
    if argument in this.forks:
        this.session.restore(this.forks[argument], undoable=True)
        return f"returned to {argument}: {this.length()}; {this.copied()}"
    path = files.named("/load", argument)
    if path.parent == files.conversations() and not path.exists():
        raise _unknown_name(this, "/load", argument)
    restored = this.session.load(path, replay=True)
    if not restored and any(message.role == "assistant" for message in this.session.messages):
        return (f"loaded {this.length()}: the saved state does not fit this model, so they are "
                "read again with the next message")  # fmt: skip
    return f"resumed {this.length()} ({restored} tokens restored from the saved state)"


def _unknown_name(this: Chat, command: str, name: str) -> InputError:
    suggestion = _suggest(name, _loadable(this))
    return InputError(
        f"no conversation is called {name!r:.40}", field=command,
        remedy=f"{suggestion} /list names them" if suggestion else "/list names them",
    )  # fmt: skip


def _loadable(this: Chat) -> list[str]:
    """Return the names that /load accepts."""
    return [*this.forks, *(name for name, _, _ in files.saved())]


def _suggest(name: str, known: Collection[str]) -> str | None:
    """Return a question that suggests the known name closest to a misspelt one."""
    matches = difflib.get_close_matches(name, known, 1)
    return f"do you mean {matches[0]}?" if matches else None


def _rm(this: Chat, argument: str) -> str:
    if this.forks.pop(argument, None) is not None:
        return f"removed the fork {argument}"
    if not argument:
        raise InputError("needs a name", field="/rm", remedy="/rm NAME")
    if not files.remove(argument):
        raise _unknown_name(this, "/rm", argument)
    return f"removed {argument}"


def _list(this: Chat, argument: str) -> str:
    entries = [(name, "fork of this conversation") for name in this.forks]
    entries += [(name, f"saved {when}, {megabytes(size)}") for name, size, when in files.saved()]
    width = max((len(name) for name, _ in entries), default=0)
    lines = [f"{name:<{max(width, 20)}} {what}" for name, what in entries]
    return "\n".join(lines) or "no forks and no saved conversations"


def _system(this: Chat, argument: str) -> str:
    if this.session.model.template is None:
        raise InputError(
            "this model has no chat template and takes no system message", field="/system"
        )
    if not argument:
        return _show(this, "system")
    message = "" if argument == NOTHING else argument
    this.session.reset(message)
    change = "set the system message" if message else "removed the system message"
    return f"{change} and started a new conversation; /undo brings the old one back"


def _set(this: Chat, argument: str) -> str:
    name, value = [*re.split(r"\s*=\s*|\s+", argument, maxsplit=1), ""][:2]
    if not name:
        return _parameters(this)
    if name not in SETTABLE:
        raise InputError(
            f"unknown parameter {name!r:.40}", field="/set",
            remedy=_suggest(name, SETTABLE) or f"choose {', '.join(SETTABLE)}",
        )  # fmt: skip
    changed = this.sampling | {name: _parse_value(name, value.strip())}
    make_params(this.session.model.defaults, changed)
    this.sampling.update(changed)
    return f"{name} {_format_value(this, name)}"


def _parse_value(name: str, text: str) -> Any:
    """Parse the value of a parameter; an empty one restores the model's own."""
    if not text:
        return None
    try:
        if name == "stop":
            return tuple(shlex.split(text))
        return int(text) if name in _INTEGERS else float(text)
    except ValueError:
        if name == "stop":
            raise InputError(f"{text!r:.40} has a quote that does not end", field=name) from None
        kind = "a whole number" if name in _INTEGERS else "a number"
        raise InputError(f"{text!r:.40} is not {kind}", field=name) from None


def _format_value(this: Chat, name: str) -> str:
    params = make_params(this.session.model.defaults, this.sampling)
    value = getattr(params, name)
    return "none" if value in (None, ()) else f"{value}"


def _parameters(this: Chat) -> str:
    known = [item.name for item in fields(SamplingParams) if item.name in SETTABLE]
    return "\n".join(f"{name:<20} {_format_value(this, name)}" for name in known)


def _show(this: Chat, argument: str) -> str:
    session, manifest = this.session, this.session.model.manifest
    if argument == "parameters":
        return _parameters(this)
    if argument == "transcript":
        transcript = [f"{message.role}: {message.content}" for message in session.messages]
        return "\n".join(transcript) or "the conversation is empty"
    if argument == "system":
        first = session.messages[:1]
        is_system = bool(first) and first[0].role == "system"
        if is_system:
            return first[0].content
        return "no system message; /system TEXT sets one and starts a new conversation"
    if argument:
        raise InputError(
            f"cannot show {argument!r:.40}", field="/show", remedy=f"choose {', '.join(SHOWN)}"
        )
    why = session.model.engine.passed_over
    return "\n".join(
        [
            f"{this.name}: {manifest.model.family}, {len(manifest.model.layers)} layers, "
            f"{manifest.quantization.recipe}, on {title(session.model.engine)}"
            + ("" if why is None else f", not on cpu: {why.message}"),
            f"{this.length()}, {session.position} tokens in the state",
            described(session),
            f"/undo, /regen and /fork keep copies, {megabytes(session.snapshot_bytes)} each now; "
            f"turns to take back: {session.undo_levels}",
        ]
    )


SHOWN = ("parameters", "system", "transcript")


def _read(this: Chat, argument: str) -> str:
    text = files.read_text("/read", argument)
    tokens = len(this.session.model.tokenizer.encode(text))
    capacity = this.session.capacity
    if capacity is not None and tokens >= capacity:
        max_context = this.session.model.config.max_context
        larger = "" if max_context == capacity else ", or start with a larger --context"
        raise InputError(f"{tokens} tokens do not fit into a context of {capacity}", field="/read",
                         remedy=f"send a part of it{larger}")  # fmt: skip
    this.attached += text.rstrip("\n") + "\n\n"
    return f"{argument}: {tokens} tokens, sent with the next message"


def _stats(this: Chat, argument: str) -> str:
    if argument in ("on", "off"):
        this.figures = argument == "on"
        return f"figures {argument}"
    if argument:
        raise InputError(f"{argument!r:.40} is neither on nor off", field="/stats")
    from edge.apps.chat.output import figures

    if this.last is None:
        return "no answer yet"
    lines = [figures(this.last, this.session, this.gain, this.last_gain)]
    lines.append(f"answers: {this.answers}, tokens: {this.tokens}")
    return "\n".join([*lines, this.gain.line()] if this.gain else lines)


def _bye(this: Chat, argument: str) -> str:
    raise EOFError


COMMANDS = {
    "/help": Command("/help", "show this list", _help),
    "/reset": Command("/reset", "forget the conversation (as /clear does)", _reset),
    "/undo": Command("/undo", "take back the last turn", _undo),
    "/regen": Command("/regen", "answer the last message again",
                      lambda this, _: this.session.regenerate(**this.sampling)),
    "/fork": Command("/fork [NAME]", "keep a copy of the conversation to come back to", _fork),
    "/save": Command("/save NAME", "save the conversation with its state", _save, path=True),
    "/load": Command("/load NAME", "resume a saved conversation or a fork", _load, path=True,
                     kept=True),
    "/list": Command("/list", "list forks and saved conversations", _list),
    "/rm": Command("/rm NAME", "remove a fork or a saved conversation", _rm, kept=True),
    "/system": Command("/system [TEXT]", 'show or set the system message; "" removes it', _system),
    "/set": Command("/set [NAME [VALUE]]", "show or set sampling parameters", _set, SETTABLE),
    "/show": Command("/show [WHAT]", "show the model, parameters, system or transcript", _show,
                     SHOWN),
    "/read": Command("/read FILE", "put a text file before the next message", _read, path=True),
    "/stats": Command("/stats [on|off]", "show figures of the last answer, or of each", _stats,
                      ("on", "off")),
    "/bye": Command("/bye", "leave (as /quit, /exit and Ctrl-D do)", _bye),
}  # fmt: skip
# names that other programs use
ALIASES = {"/quit": "/bye", "/exit": "/bye", "/clear": "/reset", "/?": "/help", "/": "/help"}
_IGNORE = ("/help", "/bye")  # these ignore an argument


def following(this: Chat, word: str) -> tuple[list[str], bool]:
    """Return the words that may follow a command, and whether a file may."""
    found = COMMANDS.get(word)
    if found is None:
        return [], False
    return _loadable(this) if found.kept else list(found.words), found.path


def command(word: str, argument: str) -> Run:
    """Return a command's function. Raises InputError if unknown, or given an argument in vain."""
    word = ALIASES.get(word.lower(), word.lower())
    if word not in COMMANDS:
        suggestion = _suggest(word, COMMANDS)
        remedy = f"{suggestion} /help lists them" if suggestion else "/help lists them"
        raise InputError(f"unknown command {word}", remedy=remedy)
    if argument and " " not in COMMANDS[word].usage and word not in _IGNORE:
        raise InputError(f"{argument!r:.40} is not expected", field=word, remedy=f"{word} alone")
    return COMMANDS[word].run
