"""The chat format of DeepSeek-V4: messages to prompt text, and completion text to a message. No template engine.

A prompt is BOS, the system text, then per turn ``<｜User｜>text<｜Assistant｜>`` with ``<think>`` (thinking) or
``</think>`` (not), the answer, EOS; nothing stands between the parts. Tool results travel in user turns. Tool calls
are written in DSML tags::

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="tool">
    <｜DSML｜parameter name="key" string="true">text</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

A message is a dict with ``role`` (system, user, assistant, tool, developer, latest_reminder) and ``content`` (text,
or a list of ``{"type": "text", "text": …}`` parts for user and tool). Further keys: ``tools`` and ``response_format``
(system, developer), ``reasoning_content``, ``tool_calls`` and ``wo_eos`` (assistant), ``tool_call_id`` (tool),
``task`` (a quick instruction, user or assistant).

Errors: ``ValueError`` naming the message's index, the rule and the value.
Source: encoding_dsv4.py of the official DeepSeek-V4 release (the preview encoder). One difference: the ``task`` of a
user message survives when the message is merged with tool results before it; the official encoder drops it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
ROLES = ("system", "user", "assistant", "tool", "developer", "latest_reminder")
CALLS_OPEN, CALLS_CLOSE = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"

Message = Mapping[str, Any]
Effort = Literal["high", "max"] | None

MAX_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
TOOLS_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"{CALLS_OPEN}" block like the following:

{CALLS_OPEN}
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
{CALLS_CLOSE}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_TAIL = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
FORMAT_HEAD = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


def encode_messages(
    messages: Sequence[Message],
    *,
    thinking: bool,
    drop_thinking: bool = True,
    tools: Sequence[Message] = (),
    reasoning_effort: Effort = None,
    add_generation_prompt: bool = True,
    add_bos: bool = True,
) -> str:
    """Render a conversation as prompt text.

    Args:
        messages: the conversation, oldest first.
        thinking: whether the model reasons before it answers.
        drop_thinking: leave the reasoning of turns before the last user turn out. Never done when there are tools.
        tools: ``{"type": "function", "function": {"name": …, …}}`` each; appended to the first system text, which is
            created if there is none.
        reasoning_effort: "max" puts a fixed paragraph first; "high" and None add nothing. Acts only when thinking.
        add_generation_prompt: end with the opening of an assistant turn if the last message is a user's.
        add_bos: start with BOS. The tokenizer must then not add another.

    Returns:
        The text, with special tokens spelled out.

    Raises:
        ValueError: a message breaks a rule; the error names its index, the rule and the value.
    """
    if reasoning_effort not in (None, "high", "max"):
        raise ValueError(f"reasoning_effort must be None, 'high' or 'max', got {reasoning_effort!r}")
    if not messages:
        raise ValueError(f"messages must not be empty, got {messages!r}")
    _check(messages)
    turns = _merge_turns(_with_tools(messages, tools))
    drop = thinking and drop_thinking and not any(turn.get("tools") for turn in turns)
    if drop:
        last = _last_user(turns)
        turns = [turn for index, turn in enumerate(turns) if turn["role"] != "developer" or index >= last]
    parts = [BOS if add_bos else "", MAX_EFFORT if thinking and reasoning_effort == "max" else ""]
    last = _last_user(turns)
    for index, turn in enumerate(turns):
        after_task = index > 0 and turns[index - 1].get("task") is not None
        reasons = thinking and not after_task and (not drop or index > last)
        parts.append(_turn_text(turn, reasons))
        following = turns[index + 1]["role"] if index + 1 < len(turns) else None
        if following in ("assistant", "latest_reminder") or (following is None and add_generation_prompt):
            parts.append(_opening(turn, thinking, thinks=thinking and (not drop or index >= last)))
    return "".join(parts)


def _turn_text(turn: Message, reasons: bool) -> str:
    role, content = turn["role"], turn.get("content") or ""
    if role == "assistant":
        reasoning = (turn.get("reasoning_content") or "") + END_THINK if reasons else ""
        return reasoning + content + _calls_text(turn.get("tool_calls") or ()) + ("" if turn.get("wo_eos") else EOS)
    if role == "latest_reminder":
        return REMINDER + content
    if role == "user":
        return USER + content
    if turn.get("tools"):
        schemas = "\n".join(_json(tool["function"]) for tool in turn["tools"])
        content += "\n\n" + TOOLS_HEAD + schemas + TOOLS_TAIL
    if turn.get("response_format"):
        content += "\n\n" + FORMAT_HEAD + _json(turn["response_format"])
    return (USER if role == "developer" else "") + content


def _opening(turn: Message, thinking: bool, thinks: bool) -> str:
    """What opens the model's turn after ``turn``."""
    task = turn.get("task")
    if task == "action":
        return ASSISTANT + (THINK if thinking else END_THINK) + "<｜action｜>"
    if task is not None:
        return f"<｜{task}｜>"
    if turn["role"] in ("user", "developer"):
        return ASSISTANT + (THINK if thinks else END_THINK)
    return ""


def _calls_text(calls: Sequence[Message]) -> str:
    if not calls:
        return ""
    invocations = []
    for call in calls:
        name, arguments = call["function"]["name"], _arguments(call["function"])
        lines = [_parameter_text(key, value) for key, value in arguments.items()]
        invocations.append(f'<{DSML}invoke name="{name}">\n' + "\n".join(lines) + f"\n</{DSML}invoke>")
    return "\n\n" + "\n".join([CALLS_OPEN, *invocations, CALLS_CLOSE])


def _parameter_text(key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    text = value if is_text else _json(value)
    return f'<{DSML}parameter name="{key}" string="{str(is_text).lower()}">{text}</{DSML}parameter>'


def _arguments(function: Message) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    return json.loads(arguments) if isinstance(arguments, str) else dict(arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---- turns -----------------------------------------------------------------------------------------------------------


def _with_tools(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    if not tools:
        return list(messages)
    for index, tool in enumerate(tools):
        _check_tool(f"tools[{index}]", tool)
    result = [dict(message) for message in messages]
    system = next((message for message in result if message["role"] == "system"), None)
    if system is None:
        system = {"role": "system", "content": ""}
        result.insert(0, system)
    system["tools"] = [*(system.get("tools") or ()), *tools]
    return result


def _merge_turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Adjacent user and tool messages become one user turn, tool results in the order of their calls."""
    turns: list[dict[str, Any]] = []
    order: dict[str, int] = {}
    for message in messages:
        turn = dict(message)
        if message["role"] not in ("user", "tool"):
            if message["role"] == "assistant" and message.get("tool_calls"):
                order = {call["id"]: index for index, call in enumerate(message["tool_calls"]) if call.get("id")}
            turns.append(turn)
            continue
        part = (order.get(message.get("tool_call_id", ""), 0), message["role"] == "tool", _text(message["content"]))
        if turns and turns[-1]["role"] == "user" and (message["role"] == "tool" or turns[-1].get("task") is None):
            turns[-1]["parts"].append(part)
            turns[-1]["task"] = turns[-1].get("task") or message.get("task")
        else:
            turns.append({"role": "user", "parts": [part], "task": message.get("task")})
    for turn in turns:
        if "parts" in turn:
            turn["content"] = _parts_text(turn["parts"])
    return turns


def _parts_text(parts: Sequence[tuple[int, bool, str]]) -> str:
    """Texts stay where they are; the slots of the tool results are filled in call order."""
    results = iter(sorted((part for part in parts if part[1]), key=lambda part: part[0]))
    return "\n\n".join(f"<tool_result>{next(results)[2]}</tool_result>" if part[1] else part[2] for part in parts)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n\n".join(part["text"] for part in content)


def _last_user(turns: Sequence[Message]) -> int:
    return max((index for index, turn in enumerate(turns) if turn["role"] in ("user", "developer")), default=-1)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check(messages: Sequence[Message]) -> None:
    calls: Sequence[Message] | None = None  # of the assistant turn that tool messages here would answer
    answered: list[str | None] = []
    for index, message in enumerate(messages):
        where = f"message {index}"
        role = message.get("role") if isinstance(message, Mapping) else None
        _rule(role in ROLES, f"{where} role", f"one of {', '.join(ROLES)}", role)
        _check_content(where, role, message)
        task = message.get("task")
        allowed = task is None or (task in TASKS and role in ("user", "assistant"))
        _rule(allowed, f"{where} task", f"one of {', '.join(TASKS)} on a user or assistant message", task)
        for tool in message.get("tools") or ():
            _rule(role in ("system", "developer"), f"{where} tools", "on a system or developer message", role)
            _check_tool(f"{where} tool", tool)
        if role == "tool":
            _check_result(where, message, calls, answered)
        elif role == "assistant":
            calls, answered = message.get("tool_calls") or (), []
            for call in calls:
                _check_call(where, call)
        elif role != "user":
            calls = None


def _check_content(where: str, role: str, message: Message) -> None:
    content = message.get("content")
    if role == "assistant" and content is None:
        _rule(bool(message.get("tool_calls")), f"{where} content", "a string where there are no tool calls", None)
    elif role in ("user", "tool") and isinstance(content, list | tuple):
        for part in content:
            is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            _rule(is_text, f"{where} content part", "of type text", part)
    elif not (role == "system" and content is None and message.get("tools")):
        _rule(isinstance(content, str), f"{where} content", "a string", content)
        _rule(role != "developer" or bool(content), f"{where} content", "not empty for a developer", content)
    reasoning = message.get("reasoning_content")
    _rule(reasoning is None or isinstance(reasoning, str), f"{where} reasoning_content", "a string", reasoning)


def _check_tool(where: str, tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    _rule(named, where, "a dict with function.name", tool)


def _check_call(where: str, call: Any) -> None:
    _check_tool(f"{where} tool call", call)
    try:
        valid = isinstance(_arguments(call["function"]), dict)
    except (TypeError, ValueError):
        valid = False
    _rule(valid, f"{where} tool call arguments", "a JSON object", call["function"].get("arguments"))


def _check_result(where: str, message: Message, calls: Sequence[Message] | None, answered: list[str | None]) -> None:
    _rule(bool(calls), f"{where} tool result", "an answer to an assistant's tool call", message["content"])
    assert calls
    known, given = [call.get("id") for call in calls], message.get("tool_call_id")
    expected = [name for name in known if name is not None]
    _rule(given is None or not expected or given in expected, f"{where} tool_call_id", f"one of {expected}", given)
    repeated = given is not None and given in answered
    _rule(not repeated, f"{where} tool_call_id", "answered only once", given)
    answered.append(given)
    _rule(len(answered) <= len(calls), f"{where} tool result", f"one of at most {len(calls)}", len(answered))


def _rule(holds: bool, subject: str, rule: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{subject} must be {rule}, got {value!r}")


# ---- completions -----------------------------------------------------------------------------------------------------

_INVOKE = re.compile(f'<{DSML}invoke name="(.*?)">\n+', re.DOTALL)
_PARAMETER = re.compile(f'<{DSML}parameter name="(.*?)" string="(true|false)">(.*?)</{DSML}parameter>\n', re.DOTALL)
_INVOKE_CLOSE = f"</{DSML}invoke>\n"


def parse_completion(text: str, thinking: bool, *, complete: bool = True) -> dict[str, Any]:
    """Split what the model wrote after the opening of its turn.

    Args:
        text: the completion, special tokens spelled out; EOS at the end may be there or not.
        thinking: whether the opening was ``<think>``; the text then starts with the reasoning.
        complete: False for a completion cut by its length limit: the reasoning may lack its end, and a tool call that
            was cut is left out.

    Returns:
        ``role``, ``content``, ``reasoning_content`` and ``tool_calls`` (function name and JSON arguments each), a
        message that ``encode_messages`` takes back.

    Raises:
        ValueError: the text is not of that form.
    """
    text = text.removesuffix(EOS)
    reasoning = ""
    if thinking:
        reasoning, found, text = text.partition(END_THINK)
        _rule(bool(found) or not complete, "completion", f"reasoning that ends with {END_THINK}", reasoning)
    content, found, block = text.partition(CALLS_OPEN)
    calls = _parse_calls(block, complete) if found else []
    content = content.removesuffix("\n\n") if found else content
    for name, part in (("content", content), ("reasoning", reasoning)):
        for token in (BOS, EOS, THINK, END_THINK, DSML):
            _rule(token not in part, f"completion {name}", f"free of {token}", part)
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}


def _parse_calls(block: str, complete: bool) -> list[dict[str, Any]]:
    """Calls of the text that follows ``<｜DSML｜tool_calls>``."""
    calls: list[dict[str, Any]] = []
    position = 1 if block.startswith("\n") else 0
    while not block.startswith(CALLS_CLOSE, position):
        parsed = _parse_call(block, position)
        if parsed is None and not complete:
            return calls
        _rule(parsed is not None, "tool call", "an invoke block with parameters", block[position:])
        assert parsed
        calls.append(parsed[0])
        position = parsed[1]
    rest = block[position + len(CALLS_CLOSE) :]
    _rule(not rest, "completion", "at its end after the tool calls", rest)
    return calls


def _parse_call(block: str, position: int) -> tuple[dict[str, Any], int] | None:
    opening = _INVOKE.match(block, position)
    if opening is None:
        return None
    name, position = opening[1], opening.end()
    values: dict[str, str] = {}
    while parameter := _PARAMETER.match(block, position):
        key, is_text, value = parameter.groups()
        _rule(key not in values, f"parameter of tool call {name!r}", "given once", key)
        values[key] = _json(value) if is_text == "true" else _checked_json(name, key, value)
        position = parameter.end()
    if not block.startswith(_INVOKE_CLOSE, position):
        return None
    arguments = "{" + ", ".join(f"{_json(key)}: {value}" for key, value in values.items()) + "}"
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call, position + len(_INVOKE_CLOSE)


def _checked_json(name: str, key: str, value: str) -> str:
    try:
        json.loads(value)
    except ValueError:
        _rule(False, f"parameter {key!r} of tool call {name!r}", "JSON", value)
    return value
