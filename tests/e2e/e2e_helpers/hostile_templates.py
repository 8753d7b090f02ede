"""Fifty chat templates that mean harm: each asks for more time or memory than anybody has, or breaks the renderer.

As one template, so that one server can be asked for each of them: `chat_template_kwargs: {"which": 7}`. Any other number,
or none, renders the messages' contents.
"""

from __future__ import annotations

_DOUBLED = "{% set n = namespace(t=[1]) %}{% for i in range(40) %}{% set n.t = [n.t, n.t] %}{% endfor %}"
_TEXT = "{% set big = 'a <b> \\n' * 400000 %}"
_LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}"
_ENDS = "{% endfor %}{% endfor %}"

HOSTILE = [
    # time: loops and recursion
    _LOOPS + _ENDS,
    _LOOPS + "x" + _ENDS,
    _LOOPS + "{{ messages[0].content }}" + _ENDS,
    "{% for i in range(99999999) %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% for x in [1] recursive %}{{ loop([x, x]) }}{{ loop([x, x]) }}{% endfor %}",
    "{% set f = joiner(',') %}" + _LOOPS + "{{ f() }}" + _ENDS,
    "{% set c = cycler(1, 2) %}" + _LOOPS + "{% set x = c.next() %}" + _ENDS,
    # time and memory: a structure that shares its parts
    _DOUBLED + "{{ n.t | tojson }}",
    _DOUBLED + "{{ n.t }}",
    _DOUBLED + "{{ n.t | string | length }}",
    _DOUBLED + "{{ n.t | pprint }}",
    _DOUBLED + "{{ n.t == [n.t, n.t] or n.t | tojson(indent=2) }}",
    "{% set n = namespace(t=(1,)) %}{% for i in range(40) %}{% set n.t = (n.t, n.t) %}{% endfor %}{{ {n.t: 1} }}",
    "{% set n = namespace(t='') %}{% for i in range(40) %}{% set n.t = {'a': n.t, 'b': n.t} %}{% endfor %}{{ n.t | tojson }}",
    # filters whose cost grows faster than their input
    _TEXT + "{{ big | urlize }}{{ ('www.a.b ' * 2000000) | urlize }}{{ ('(' * 200000 + 'www.x.y') | urlize }}",
    _TEXT + "{{ (big * 9) | wordwrap(1) }}{{ ('x' * 20000000) | wordwrap(2) }}",
    _TEXT + "{{ (big * 9) | striptags }}{{ ('<' * 20000000) | striptags }}",
    _TEXT + "{{ (big * 9) | title }}{{ (big * 9) | xmlattr }}",
    "{{ (range(99999) | list * 999) | sort | unique | list | length }}",
    "{{ (range(99999) | list * 999) | groupby(0) | list }}",
    "{{ ((range(99999) | list) * 2000) | map('string') | join(',') }}",
    "{{ lipsum(n=99999999) }}",
    "{{ lipsum(n=20, min=99999999, max=999999999) }}",
    "{% for i in range(99999) %}{{ lipsum(n=999, html=false) }}{% endfor %}",
    "{{ (range(99999) | list | batch(1) | list) * 99999 }}",
    "{{ messages | tojson(indent=999999999) }}",
    # memory: one large thing
    "{{ 'x' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ 'x'.ljust(10000000000) }}",
    "{{ 'x' | center(10000000000) }}",
    "{{ 'x\\ny' | indent(10000000000, true) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=2000000000) }}",
    "{{ range(99999) | join('x' * 1000000) }}",
    "{{ ('x' * 99999).join(range(99999) | map('string')) }}",
    "{{ ('x' * 99999).replace('x', 'y' * 999999) }}",
    "{{ ('x' * 99999) | replace('x', 'y' * 999999) }}",
    "{% set n = namespace(t='xxxxxxxx') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "{% set n = namespace(t='xxxxxxxx') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
    "{% set n = namespace(t=[1]) %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
    "{% set b %}{% for i in range(99999) %}{{ 'x' * 999999 }}{% endfor %}{% endset %}{{ b | length }}",
    "{{ strftime_now('%c' * 99999999) }}",
    # what breaks the renderer
    "{{ ('x' * 99999999) | int(base=36) }}{{ undefined_thing.attribute }}",
    "{{ raise_exception('x' * 99999999) }}",
]

TEMPLATE = (
    "".join(f"{{% if which == {number} %}}{source}{{% endif %}}" for number, source in enumerate(HOSTILE))
    + "{% for message in messages %}{{ message.content }}{% endfor %}"
)

# jinja2 applies filters to constants when it compiles.
HANGS_WHEN_COMPILED = "{{ 'x' | center(300000000) | length }}" * 400
