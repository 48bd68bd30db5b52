"""The template interpreter: the results of Jinja, within bounds that no template can exceed."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edge.errors import TokenizerError
from edge.text import jinja_values
from edge.text.jinja import ParsedTemplate
from edge.text.jinja_values import MAX_WORK, Budget, attribute_getter
from edge.text.template import MAX_TEMPLATE, ChatTemplate, Message
from tests.text_samples import tokenizer

NAMES: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": " be <kind> & 'brief' "},
        {"role": "user", "content": "é 東京\nline two\n"},
        {"role": "assistant", "content": "<think>why</think> because"},
        {"role": "user", "content": ""},
    ],
    "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", "tools": None,
    "documents": None,
}  # fmt: skip
JINJA = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
)
# one construct each, so that a difference shows where it is
SAME = [
    "{{ 1 + 2 * 3 - 4 // 3 % 2 }} {{ 7 / 2 }} {{ -1 }} {{ +1 }} {{ 1.5 }} {{ true }} {{ none }}",
    "{{ 'a' ~ 1 ~ none ~ 'b' }}{{ 'x' * 3 }}{{ ('a', 'b')[1] }}{{ [1, 2, 3][-1] }}",
    "{{ messages[0].role }}{{ messages[0]['role'] }}{{ messages[-1]['role'] }}",
    "{{ messages[0].nothing }}{{ nothing }}{{ nothing is defined }}{{ messages[9] }}",
    "{{ 'abcdef'[1:4] }}{{ 'abcdef'[::-1] }}{{ messages[1:] | length }}{{ 'abc'[9] }}",
    "{{ 1 < 2 < 3 }}{{ 3 > 2 > 2 }}{{ 'a' in 'abc' }}{{ 'z' not in ['a'] }}{{ 1 == 1.0 }}",
    "{{ 'a' if messages else 'b' }}{{ 'a' if false }}{{ not 1 }}{{ 0 or 'x' }}{{ 1 and 2 }}",
    "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}"
    "{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.role if loop.previtem }}{{ loop.nextitem is defined }}"
    "{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{{ loop.depth }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% else %}none"
    "{% endfor %}{% for x in [] %}{% else %}empty{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}"
    "{% for k in messages[0] %}{{ k }}{% endfor %}{% for c in 'abc' %}{{ c }}-{% endfor %}",
    "{% for a, (b, c) in [[1, [2, 3]]] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
    "{% for i in range(1, 9, 2) %}{% if i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% set x = 1 %}{% for i in range(2) %}{{ x }}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}",
    "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}",
    "{% set ns = namespace(n=0, s='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.s = ns.s ~ m.role[0] %}{% endfor %}{{ ns.n }}{{ ns.s }}{{ ns.nothing }}"
    "{{ ns['n'] }}",
    "{% set a, b = 1, 'two' %}{{ a }}{{ b }}{% set x %}block {{ a }}{% endset %}[{{ x }}]",
    "{% set x | trim | upper %}  block {% endset %}[{{ x }}]",
    "{% with x = 1, y = 2 %}{{ x + y }}{% endwith %}{{ x }}",
    "{% filter upper %}a{{ 'b' }}c{% endfilter %}{% filter trim | title %} a b {% endfilter %}",
    "{% macro f(a, b='B', c=a) %}{{ a }}{{ b }}{{ c }}{{ varargs | length }}{% endmacro %}"
    "{{ f(1) }}{{ f(1, 2) }}{{ f(1, c=3) }}{{ f(b=2, a=1) }}{{ f(1, 2, 3, 4) }}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ f(*[1, 3]) }}{{ f(0, *(4,)) }}"
    "{{ f(*[5], b=6) }}{{ '-'.join(*[['x', 'y']]) }}",
    "{{ messages[0] | string }}{{ ['a\n', 1.5, none, [true], {1: \"it's\"}] }}{{ [] ~ '' == '[]' }}"
    "{{ messages[1:3] }}{{ ['\x07é\U000f0000'] | string | length }}",
    "{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}in{% endcall %}",
    "{% macro f(x) %}{% for y in x %}{{ caller(y) }}{% endfor %}{% endmacro %}"
    "{% call(z) f([1, 2]) %}<{{ z }}>{% endcall %}",
    "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ x }}{% endmacro %}{% set x = 5 %}"
    "{{ a() }}",
    "{% block b %}{{ bos_token }}{% endblock %}{# note #}{% raw %}{{ x }}{% endraw %}",
    "{{ ' a ' | trim }}{{ 'xxaxx' | trim('x') }}{{ 'a b' | title }}{{ 'aB' | upper | lower }}",
    "{{ 'abc' | capitalize }}{{ 'aXbX' | replace('X', '-') }}{{ 'aXbX' | replace('X', '-', 1) }}",
    "{{ messages | length }}{{ 'abc' | count }}{{ nothing | length }}{{ {} | length }}",
    "{{ nothing | default('d') }}{{ '' | d('e') }}{{ '' | default('f', true) }}",
    "{{ [3, 1, 2] | sort | join(',') }}{{ ['b', 'A'] | sort | join }}{{ [1, 2] | sort(reverse=true)"
    " | join }}{{ messages | sort(attribute='role') | map(attribute='role') | join(' ') }}",
    "{{ messages | map(attribute='role') | unique | join(',') }}"
    "{{ ['a', 'A', 1] | unique | join }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | rejectattr('role', 'eq', 'user') | map(attribute='role') | join(',') }}"
    "{{ messages | selectattr('nothing', 'defined') | list | length }}",
    "{{ [1, 2, 3] | select('odd') | join }}{{ [1, none] | select | join }}"
    "{{ [1, 2] | reject('eq', 1) | join }}",
    "{{ [' a', 'b '] | map('trim') | join('|') }}{{ ['a'] | map('upper') | first }}"
    "{{ ['ab'] | map('replace', 'a', 'x') | list | last }}",
    "{{ [1, 2, 3] | first }}{{ [1, 2, 3] | last }}{{ [1, 5, 2] | max }}{{ [4, 1] | min }}"
    "{{ [] | first }}{{ [1, 2] | reverse | join }}{{ 'abc' | reverse }}",
    "{{ {'b': 1, 'a': 2} | dictsort | map('first') | join }}"
    "{% for k, v in {'b': 1, 'a': 2} | dictsort(by='value') %}{{ k }}{% endfor %}",
    "{{ {'a': 1} | items | list | length }}{{ {'a': 1}.get('a') }}{{ {'a': 1}.get('b', 'c') }}",
    "{{ '3.7' | int }}{{ 'x' | int(5) }}{{ '3.5' | float }}{{ 3.7 | int }}{{ -3 | abs }}"
    "{{ 2.567 | round(1) }}{{ 2.1 | round(method='ceil') }}{{ 7 | round }}",
    "{{ 'a\nb' | indent(2) }}{{ 'a\nb' | indent(2, true) }}{{ 'a\n\nb' | indent(1, blank=true) }}",
    "{{ 'a b  c'.split() | join(',') }}{{ 'a,b,c'.split(',', 1) | join('|') }}"
    "{{ 'a</think>b'.split('</think>')[-1] }}{{ 'a.b'.rsplit('.', 1)[0] }}",
    "{{ ' a '.strip() }}{{ 'xxa'.lstrip('x') }}{{ 'axx'.rstrip('x') }}{{ 'ab'.startswith('a') }}"
    "{{ 'ab'.endswith(('b', 'c')) }}{{ 'Ab'.lower() }}{{ 'ab'.upper() }}{{ 'ab'.title() }}",
    "{{ 'aba'.find('b') }}{{ 'aba'.rfind('a') }}{{ 'aba'.count('a') }}{{ 'aXb'.replace('X', '-') }}"
    "{{ '-'.join(['a', 'b']) }}{{ 'a-b'.partition('-')[2] }}{{ 'ab'.removeprefix('a') }}",
    "{{ 'a\nb'.splitlines() | length }}{{ '12'.isdigit() }}{{ [1, 1].count(1) }}{{ [5].index(5) }}",
    "{{ 1 is number }}{{ 'a' is string }}{{ {} is mapping }}{{ [] is iterable }}"
    "{{ [] is sequence }}{{ none is none }}{{ true is boolean }}{{ 1 is integer }}"
    "{{ 1.0 is float }}{{ 4 is even }}"
    "{{ 3 is odd }}{{ 9 is divisibleby 3 }}{{ 1 is in [1] }}{{ 1 is eq 1 }}{{ true is true }}"
    "{{ false is false }}{{ nothing is undefined }}{{ 1 is not none }}",
    "{{ dict(a=1).a }}{{ dict([('k', 'v')])['k'] }}{{ namespace(a=1).a }}",
    "  {%- if true -%}  x  {%- endif -%}  \n  {% if true %}\n  y\n  {% endif %}\n{{ 'z' }}\n",
    "{% if false %}a{% elif 0 %}b{% elif 1 %}c{% else %}d{% endif %}",
    "{{ 'ab' in messages[1].content }}{{ messages[0].content | trim | length }}",
    "{{ [2] | list | length }}{{ ([1] + [2]) | join }}"
    "{{ [[1, 2], [3]] | map('first') | join }}",
    "{{ loop is defined }}{{ 'self' }}{{ not nothing }}{{ nothing == none }}{{ nothing ~ 'x' }}",
    "{{ 'é'.upper() }}{{ 'ß' | upper }}{{ 'ﬁ' | capitalize }}{{ 'x' is in 'xyz' }}",
    "{% for i in [1, 2, 3] %}{% for j in [1, 2] %}{{ loop.index }}{% endfor %}{{ loop.index }}"
    "{% endfor %}",
]  # fmt: skip
FAILING = [
    "{{ nothing.attribute }}", "{{ nothing['a'] }}", "{{ nothing() }}", "{{ 1 + 'a' }}",
    "{{ 'a' + none }}", "{{ messages[0].role() }}", "{% for x in 1 %}{% endfor %}", "{{ -'a' }}",
    "{% macro f(a) %}{% endmacro %}{{ f(*1) }}",
    "{{ nothing + 1 }}", "{{ 1 < 'a' }}", "{% set a, b = [1] %}", "{{ 1 in 2 }}", "{{ 1 / 0 }}",
    "{% set m = messages[0] %}{% set m.role = 'x' %}", "{{ 5 | length }}", "{{ [1, 'a'] | sort }}",
]  # fmt: skip


@pytest.mark.parametrize("source", SAME)
def test_means_what_it_means_in_jinja(source: str) -> None:
    assert ParsedTemplate(source).render(NAMES) == JINJA.from_string(source).render(NAMES)


@pytest.mark.parametrize("source", FAILING)
def test_fails_where_jinja_fails(source: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - of many kinds
        JINJA.from_string(source).render(NAMES)
    with pytest.raises(Exception):  # noqa: B017
        ParsedTemplate(source).render(NAMES)


PIECES = st.sampled_from(
    [
        "{% for m in messages %}", "{% endfor %}", "{% if m %}", "{% else %}", "{% endif %}",
        "{{ m.role }}", "{{ loop.index }}", "{%- set x = 1 -%}", "{{ x }}", "{{- 'a' -}}", "\n",
        "{% if loop.first %}", "{% elif x == 2 %}", "{% macro f(a) %}", "{% endmacro %}", "  ",
        "{% set ns = namespace(y=1) %}", "{% set ns.y = ns.y + 1 %}", "{{ ns.y }}", "{{ f(x) }}",
        "{{ m.content | trim }}", "{% set x %}", "{% endset %}", "{% with x = 7 %}", "text",
        "{% set x = x + 1 %}", "{% break %}", "{% endwith %}", "{% filter upper %}",
        "{% endfilter %}",
    ]
)  # fmt: skip


@given(st.lists(PIECES, max_size=14).map("".join))
@settings(max_examples=300)
def test_any_mix_of_statements_means_what_it_means_in_jinja(source: str) -> None:
    def outcome(render: Any) -> str | None:
        try:
            return str(render())
        except Exception:
            return None

    expected = outcome(lambda: JINJA.from_string(source).render(NAMES))
    found = outcome(lambda: ParsedTemplate(source).render(NAMES))
    assert found == expected, source


# -- bounds ----------------------------------------------------------------------------------------

HUGE = "{% set s = 'a' * 4000000 %}"
# two equal lists, each nested in 31 lists with two references: 2 ** 31 elements to walk through
SHARED = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(31) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
HOSTILE = [
    "{{ 1 | round(1000000000) }}", "{{ 1.5 | round(-1000000000) }}", "{{ 1e308 | round(400) }}",
    "{{ range(90000) | map('int') | map('string') | unique | list | length }}" * 40,
    "{% set d = {" + ", ".join(f"{i * (2**61 - 1)}: 1" for i in range(9000)) + "} %}",
    "{{ [" + ", ".join(f"{i * (2**61 - 1)}" for i in range(9000)) + "] | unique | list | length }}",
    HUGE + "{% for i in range(1500) %}{{ s }}{% endfor %}",
    HUGE + "{% for i in range(1500) %}{% set x %}{{ s }}{% endset %}{% endfor %}",
    HUGE + "{% for i in range(1500) %}{% filter upper %}{{ s }}{% endfilter %}{% endfor %}",
    "{% macro f() %}{{ caller() }}{% endmacro %}" + HUGE
    + "{% for i in range(1500) %}{% call f() %}{{ s }}{% endcall %}{% endfor %}",
    HUGE + "{% for i in range(1500) %}{% set x = s ~ i %}{% endfor %}",
    HUGE + "{% for i in range(1500) %}{% set x = s[1:] %}{% endfor %}",
    HUGE + "{% for i in range(1500) %}{% set x = s.upper() == s.lower() %}{% endfor %}",
    HUGE + "{{ s.split('a') | length }}", HUGE + "{{ s | list | length }}",
    "{% set s = 'a ' * 2000000 %}{{ s.split() | length }}",
    "{% set s = 'a\n' * 2000000 %}{{ s.splitlines() | length }}",
    HUGE + "{{ s.rfind('b' ~ 'a' * 1000000) }}", HUGE + "{{ s.strip(range(90000) | join) }}",
    HUGE + "{{ s.rsplit('b' ~ 'a' * 1000000) }}",
    HUGE + "{% for i in range(9999) %}{% if 'b' in s %}{% endif %}{% endfor %}",
    "{% set x = [1] * 100000 %}{% for i in x %}{% if x == x %}{% endif %}{% endfor %}",
    "{% set x = [1] * 100000 %}{% for i in x %}{{ x | length }}{{ x | sort | first }}{% endfor %}",
    "{% set ns = namespace(a=[]) %}{% for i in range(400) %}{% set ns.a = [ns.a] %}{% endfor %}"
    "{{ ns.a == ns.a }}",
    "{% set ns = namespace(a=[]) %}{% for i in range(60) %}{% set ns.a = [ns.a] %}{% endfor %}"
    "{{ ([ns.a] * 9000) | tojson(indent=16) }}",
    "{% set ns = namespace(a=1) %}{% for i in range(99) %}{% set ns.a = ns.a * 999999999 * ns.a %}"
    "{% endfor %}",
    "{{ 0x" + "f" * 5000 + " }}", "{{ " + "9" * 5000 + " }}", 
    "{{ ('9' * 1000) | int * 1 }}" * 9999,
    "{{ strftime_now('%9999999Y') }}", "{{ strftime_now('%-0999999999d') }}",
    "{% macro a() %}{{ b() }}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}"
    "{{ a() }}",
    "".join(f"{{% macro f{i}() %}}{{{{ f{i + 1}() }}}}{{{{ f{i + 1}() }}}}{{% endmacro %}}"
            for i in range(60)) + "{{ f0() }}",
    "{{ a" + ".b" * 5000 + " }}", "{{ " + "not " * 5000 + "1 }}", "{{ " + "-" * 5000 + "1 }}",
    "{{ " + "[" * 3000 + "]" * 3000 + " }}", "{{ 1" + " + 1" * 20000 + " }}",
    "{% for i in range(99999) %}" * 60 + "{% endfor %}" * 60,
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{{ [1] * 100001 | join }}", "{{ range(100001) }}",
    "{% set x = ['\x07' * 1000] * 3000 %}{{ x }}", "{{ [messages, range] | string }}",
    "{{ messages | tojson(separators=('x' * 4000000, '')) }}",
    # formatted text, and repeated values, where a number is expected
    *(f"{{{{ ['%0900000000d'] | select({test}) | list }}}}"
      for test in ("'odd'", "'even'", "'divisibleby', 3")),
    "{{ [1] | round(8, 'floor') }}", "{{ ['a'] | map('round', 9, 'ceil') | list }}",
    "{% set x = [1] * 10000 %}{{ x | tojson(separators=['a' * 100000, '']) }}",
    # values read without charge: comparisons by `changed`, paths, messages, arguments
    SHARED + "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}",
    SHARED + "{{ [1][ns.a].b }}",
    "{% set x = range(20000) | sort(attribute='a.' * 100000) %}",
    "{% set x = [1] * 50000 %}{% set y = [1] * 50000 %}{% for i in range(99999) %}"
    "{{ loop.changed(x if i % 2 else y) }}{% endfor %}",
    f"{{% macro f({','.join(f'a{i}' for i in range(20000))}) %}}{{% endmacro %}}"
    "{% for i in range(2000) %}{% set x = f() %}{% endfor %}",
    "{% set ns = namespace(a=9) %}{% for i in range(10) %}{% set ns.a = ns.a * ns.a %}{% endfor %}"
    "{% for i in range(99999) %}{% set x = [ns.a | string, ns.a | string] %}{% endfor %}",
]  # fmt: skip
PATH = ".".join("a" * 128)
# mappings nested 50 deep, in a list
DEEP = (
    "{% set ns = namespace(a=1) %}{% for i in range(50) %}{% set ns.a = {'a': ns.a} %}{% endfor %}"
    "{% set l = [ns.a] * 1000 %}"
)
BY_PATH = [
    f"{values}{''.join(f'{{% set x = l | {use} %}}' for _ in range(40))}"
    for values, path in (
        ("{% set l = range(100000) %}", PATH),
        ("{% set l = [[]] * 60000 %}", "0." * 127 + "a"),
        (DEEP, ".".join("a" * 50)),
    )
    for use in (
        f"map(attribute='{path}')", f"map(attribute='{path}', default=1)",
        f"selectattr('{path}')", f"rejectattr('{path}', 'undefined')",
        f"sort(attribute='{path}')", f"unique(attribute='{path}')", f"min(attribute='{path}')",
        f"max(attribute='{path}')", f"join(',', attribute='{path}')",
    )
] + [
    ("{% for i in range(99999) %}{% set x = [] | map(attribute='" + PATH + "') %}{% endfor %}") * 9,
    ("{% for i in range(99999) %}{% set x = [] | selectattr('" + PATH + "') %}{% endfor %}") * 9,
]  # fmt: skip
# long, but useless to an attacker: they run, and quickly
LONG = [
    "{{ 1" + " < 2" * 15000 + " }}",
    "{% if 0 %}" + "{% elif 0 %}" * 7500 + "{% endif %}",
    "{{ " + " ~ ".join(["'a'"] * 15000) + " }}",
    "{{ [" + "1, " * 30000 + "] | length }}",
    "{% set x = 1 %}" * 5000,
    "x" * (MAX_TEMPLATE - 1),
    "{{ 1 }}" * 10000,
    " \n" * 100_000,
    "{#" + "#" * 200_000 + "#}",
    "{% raw %}" + "{% " * 50_000 + "{% endraw %}",
]


def spent(source: str) -> tuple[float, Exception | None]:
    """Return the CPU seconds for reading and rendering a template, and the outcome."""
    began, problem = time.process_time(), None
    try:
        template = ChatTemplate(source, tokenizer("bytes"))
        template.render_text([Message("user", "hi")])
    except TokenizerError as refusal:
        problem = refusal
    return time.process_time() - began, problem


# the last figure divides the budget of a rendering, and so its bounds: repeated lookups spend time
# and memory evenly
BOUNDS = [
    *((source, 8, 512, 1) for source in HOSTILE), *((source, 5, 128, 4) for source in BY_PATH),
]  # fmt: skip


@pytest.mark.parametrize(("source", "most_s", "most_mib", "part"), BOUNDS, ids=range(len(BOUNDS)))
def test_hostile_templates_end(
    source: str, most_s: int, most_mib: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent("{{ 1 }}")  # takes what only the first rendering takes
    monkeypatch.setattr(jinja_values, "MAX_WORK", MAX_WORK // part)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, problem = spent(source)
    assert problem is not None and seconds < most_s / part
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert kib < (most_mib << 10) / part


def test_a_path_ends_at_the_first_missing_part() -> None:
    """No value of a chain of undefined ones is kept."""
    made = attribute_getter(Budget(), PATH)({"a": {"a": 1}})
    assert isinstance(made, Undefined) and made._undefined_obj == 1


@pytest.mark.parametrize("source", LONG, ids=range(len(LONG)))
def test_long_templates_run(source: str) -> None:
    seconds, problem = spent(source)
    assert problem is None and seconds < 5


def test_a_long_talk_is_no_attack() -> None:
    """Thousands of messages, and templates that search all of them repeatedly."""
    talk = [Message(("user", "assistant")[i % 2], f"message {i} " * 20) for i in range(10_000)]
    source = (
        "{% for m in messages %}{% if loop.index0 == messages | length - 1 %}last{% endif %}"
        "{% if m is mapping and m.content is string and m.role == 'user' %}{{ m.role ~ m.content }}"
        "{% else %}{{ m['content'].strip() | trim }}{% endif %}{% endfor %}"
    )
    text = ChatTemplate(source, tokenizer("bytes")).render_text(talk)
    assert text.count("message") == 10_000 * 20 and "last" in text


def test_the_budget_is_no_clock() -> None:
    """A clock would make a loaded machine refuse what another accepts."""
    program = ParsedTemplate("{% for i in range(99999) %}{{ i }}{% endfor %}")
    assert program.render({}) == program.render({})
    with pytest.raises(Exception, match="steps"):
        Budget().spend(MAX_WORK + 1)
