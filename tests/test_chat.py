import hashlib
import json

import pytest
from hypothesis import given, settings, strategies as st

from dsv4.chat import MAX_EFFORT, encode_messages, parse_completion

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"


def system(text, **keys):
    return {"role": "system", "content": text, **keys}


def user(text, **keys):
    return {"role": "user", "content": text, **keys}


def assistant(text, **keys):
    return {"role": "assistant", "content": text, **keys}


def tool(text, call_id=None):
    return {"role": "tool", "content": text} | ({"tool_call_id": call_id} if call_id else {})


def call(name, arguments, call_id=None):
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call_id} if call_id else {})


def schema(name, **keys):
    return {"type": "function", "function": {"name": name, **keys}}


def invoke(name, *parameters):
    lines = [f'<｜DSML｜parameter name="{k}" string="{s}">{v}</｜DSML｜parameter>' for k, s, v in parameters]
    return f'<｜DSML｜invoke name="{name}">\n' + "\n".join(lines) + "\n</｜DSML｜invoke>\n"


def calls_block(*invocations):
    return "\n\n<｜DSML｜tool_calls>\n" + "".join(invocations) + "</｜DSML｜tool_calls>"


# ---- turns and thinking ----------------------------------------------------------------------------------------------


def test_opening_of_the_assistant_turn():
    messages = [system("Be brief."), user("2+2?")]
    assert encode_messages(messages, thinking=True) == f"{BOS}Be brief.{USER}2+2?{ASSISTANT}<think>"
    assert encode_messages(messages, thinking=False) == f"{BOS}Be brief.{USER}2+2?{ASSISTANT}</think>"
    bare = encode_messages(messages, thinking=True, add_generation_prompt=False, add_bos=False)
    assert bare == f"Be brief.{USER}2+2?"


CONVERSATION = [
    user("Hello"),
    assistant("Hi.", reasoning_content="A greeting."),
    user("Bye"),
    assistant("See you.", reasoning_content="A farewell."),
]


def test_earlier_reasoning_is_dropped():
    assert encode_messages(CONVERSATION, thinking=True) == (
        f"{BOS}{USER}Hello{ASSISTANT}</think>Hi.{EOS}{USER}Bye{ASSISTANT}<think>A farewell.</think>See you.{EOS}"
    )


def test_earlier_reasoning_is_kept_on_request():
    assert encode_messages(CONVERSATION, thinking=True, drop_thinking=False) == (
        f"{BOS}{USER}Hello{ASSISTANT}<think>A greeting.</think>Hi.{EOS}"
        f"{USER}Bye{ASSISTANT}<think>A farewell.</think>See you.{EOS}"
    )


def test_chat_mode_never_shows_reasoning():
    for drop in (True, False):
        assert encode_messages(CONVERSATION, thinking=False, drop_thinking=drop) == (
            f"{BOS}{USER}Hello{ASSISTANT}</think>Hi.{EOS}{USER}Bye{ASSISTANT}</think>See you.{EOS}"
        )


def test_assistant_prefix_without_end():
    messages = [user("Count"), assistant("one, two", wo_eos=True)]
    assert encode_messages(messages, thinking=False) == f"{BOS}{USER}Count{ASSISTANT}</think>one, two"


def test_adjacent_user_messages_merge():
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert encode_messages([user("a"), user(parts)], thinking=False) == f"{BOS}{USER}a\n\nb\n\nc{ASSISTANT}</think>"


def test_reasoning_effort():
    plain = encode_messages([user("x")], thinking=True)
    assert encode_messages([user("x")], thinking=True, reasoning_effort="high") == plain
    strong = encode_messages([user("x")], thinking=True, reasoning_effort="max")
    assert strong == BOS + MAX_EFFORT + plain.removeprefix(BOS)
    assert MAX_EFFORT.startswith("Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very")
    assert MAX_EFFORT.endswith("no assumption is left unchecked.\n\n")
    chat = encode_messages([user("x")], thinking=False, reasoning_effort="max")
    assert chat == encode_messages([user("x")], thinking=False)


def test_reminder_and_quick_instructions():
    messages = [
        system("S"),
        {"role": "latest_reminder", "content": "Monday"},
        user("Hot springs?"),
        assistant("Many."),
        user("Where?", task="action"),
        assistant("Search"),
    ]
    head = f"{BOS}S<｜latest_reminder｜>Monday{USER}Hot springs?{ASSISTANT}</think>Many.{EOS}{USER}Where?{ASSISTANT}"
    assert encode_messages(messages, thinking=False) == f"{head}</think><｜action｜>Search{EOS}"
    # The answer to a quick instruction carries no reasoning, even where the model thinks.
    assert encode_messages(messages, thinking=True) == f"{head}<think><｜action｜>Search{EOS}"
    assert encode_messages([user("q", task="query")], thinking=True) == f"{BOS}{USER}q<｜query｜>"
    titled = [user("q"), assistant("a", task="title"), assistant("Title")]
    assert encode_messages(titled, thinking=False) == f"{BOS}{USER}q{ASSISTANT}</think>a{EOS}<｜title｜>Title{EOS}"


def test_developer_turns_before_the_last_user_turn_are_dropped():
    messages = [{"role": "developer", "content": "D"}, assistant("a"), user("u")]
    assert encode_messages(messages, thinking=True) == f"{BOS}a{EOS}{USER}u{ASSISTANT}<think>"
    kept = encode_messages(messages, thinking=False)
    assert kept == f"{BOS}{USER}D{ASSISTANT}</think>a{EOS}{USER}u{ASSISTANT}</think>"


def test_response_format():
    prompt = encode_messages([system("S", response_format={"type": "object"}), user("u")], thinking=False)
    assert prompt == (
        f"{BOS}S\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        f'{{"type": "object"}}{USER}u{ASSISTANT}</think>'
    )


# ---- tools -----------------------------------------------------------------------------------------------------------


def test_official_tool_conversation():
    """The digest is that of the expected output of the official encoder's first test case."""
    text = {"type": "string"}
    unit = text | {"enum": ["celsius", "fahrenheit"], "description": "Temperature unit"}
    count = {"type": "integer", "description": "Number of results to return"}
    weather = {"location": text | {"description": "The city name"}, "unit": unit}
    search = {"query": text | {"description": "Search query"}, "num_results": count}
    tools = [
        schema(name, description=about, parameters={"type": "object", "properties": fields, "required": [required]})
        for name, about, fields, required in (
            ("get_weather", "Get the weather for a specific location", weather, "location"),
            ("search", "Search the web for information", search, "query"),
        )
    ]
    messages = [
        system("You are a helpful assistant."),
        user("What's the weather in Beijing?"),
        assistant(
            None,
            reasoning_content="The user wants to know the weather in Beijing. I should use the get_weather tool.",
            tool_calls=[call("get_weather", {"location": "Beijing", "unit": "celsius"}, "call_001")],
        ),
        tool('{"temperature": 22, "condition": "sunny", "humidity": 45}', "call_001"),
        assistant(
            "The weather in Beijing is currently sunny with a temperature of 22°C and 45% humidity.",
            reasoning_content="Got the weather data. Let me format a nice response.",
        ),
    ]
    prompt = encode_messages(messages, thinking=True, tools=tools)
    digest = "9b366d9d2eac842a6e890594aac0b58648e5623717202b33497afadf03e26540"
    assert hashlib.sha256(prompt.encode()).hexdigest() == digest


def test_tool_calls_and_results_in_call_order():
    messages = [
        user("Compare"),
        assistant(
            "Let me look.",
            reasoning_content="Two calls.",
            tool_calls=[call("f", '{"city": "Köln", "days": 2}', "a"), call("g", {"deep": {"x": [1, None]}}, "b")],
        ),
        tool("second", "b"),
        tool([{"type": "text", "text": "first"}], "a"),
        user("Go on"),
    ]
    first = invoke("f", ("city", "true", "Köln"), ("days", "false", "2"))
    block = calls_block(first, invoke("g", ("deep", "false", '{"x": [1, null]}')))
    assert encode_messages(messages, thinking=True, drop_thinking=False) == (
        f"{BOS}{USER}Compare{ASSISTANT}<think>Two calls.</think>Let me look.{block}{EOS}"
        f"{USER}<tool_result>first</tool_result>\n\n<tool_result>second</tool_result>\n\nGo on{ASSISTANT}<think>"
    )


def test_tools_keep_all_reasoning_and_create_a_system_text():
    prompt = encode_messages(CONVERSATION, thinking=True, tools=[schema("f", about="é")])
    assert prompt.startswith(f"{BOS}\n\n## Tools\n\nYou have access to a set of tools")
    assert '\n\n### Available Tool Schemas\n\n{"name": "f", "about": "é"}\n\nYou MUST strictly' in prompt
    assert "<think>A greeting.</think>Hi." in prompt
    on_message = [system("", tools=[schema("f", about="é")]), *CONVERSATION]
    assert encode_messages(on_message, thinking=True) == prompt


def test_calls_and_results_without_ids():
    messages = [user("u"), assistant("", tool_calls=[call("f", {}), call("f", {})]), tool("1"), tool("2")]
    prompt = encode_messages(messages, thinking=False)
    assert prompt.endswith(f"{USER}<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>{ASSISTANT}</think>")


def test_task_survives_merging_with_a_tool_result():
    messages = [user("u"), assistant("", tool_calls=[call("f", {})]), tool("1"), user("v", task="domain")]
    assert encode_messages(messages, thinking=False).endswith("</tool_result>\n\nv<｜domain｜>")


# ---- errors ----------------------------------------------------------------------------------------------------------

ROLES = "system, user, assistant, tool, developer, latest_reminder"


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "messages must not be empty, got []"),
        ([user("a"), {"role": "robot", "content": "b"}], f"message 1 role must be one of {ROLES}, got 'robot'"),
        (["hello"], f"message 0 role must be one of {ROLES}, got None"),
        ([{"role": "user"}], "message 0 content must be a string, got None"),
        ([user(5)], "message 0 content must be a string, got 5"),
        ([user([{"type": "image"}])], "message 0 content part must be of type text, got {'type': 'image'}"),
        ([user("a"), assistant(None)], "message 1 content must be a string where there are no tool calls, got None"),
        ([assistant("a", reasoning_content=3)], "message 0 reasoning_content must be a string, got 3"),
        ([{"role": "developer", "content": ""}], "message 0 content must be not empty for a developer, got ''"),
        ([user("a"), tool("x")], "message 1 tool result must be an answer to an assistant's tool call, got 'x'"),
        ([assistant("a"), tool("x")], "message 1 tool result must be an answer to an assistant's tool call, got 'x'"),
        (
            [assistant("", tool_calls=[call("f", {}, "a")]), tool("x", "b")],
            "message 1 tool_call_id must be one of ['a'], got 'b'",
        ),
        (
            [assistant("", tool_calls=[call("f", {}, "a"), call("f", {}, "b")]), tool("x", "a"), tool("y", "a")],
            "message 2 tool_call_id must be answered only once, got 'a'",
        ),
        (
            [assistant("", tool_calls=[call("f", {})]), tool("x"), tool("y")],
            "message 2 tool result must be one of at most 1, got 2",
        ),
        (
            [assistant("", tool_calls=[call("f", "[1]")])],
            "message 0 tool call arguments must be a JSON object, got '[1]'",
        ),
        (
            [assistant("", tool_calls=[call("f", "{oops")])],
            "message 0 tool call arguments must be a JSON object, got '{oops'",
        ),
        ([assistant("", tool_calls=[{}])], "message 0 tool call must be a dict with function.name, got {}"),
        ([system("s", tools=[{}])], "message 0 tool must be a dict with function.name, got {}"),
        ([user("s", tools=[{}])], "message 0 tools must be on a system or developer message, got 'user'"),
        (
            [user("a", task="dance")],
            "message 0 task must be one of action, query, authority, domain, title, read_url on a user or assistant "
            "message, got 'dance'",
        ),
    ],
)
def test_bad_messages(messages, error):
    with pytest.raises(ValueError) as caught:
        encode_messages(messages, thinking=False)
    assert str(caught.value) == error


def test_bad_arguments():
    with pytest.raises(ValueError, match="reasoning_effort must be None, 'high' or 'max', got 'low'"):
        encode_messages([user("a")], thinking=True, reasoning_effort="low")
    with pytest.raises(ValueError, match=r"tools\[1\] must be a dict with function.name, got 'f'"):
        encode_messages([user("a")], thinking=True, tools=[schema("f"), "f"])


# ---- completions -----------------------------------------------------------------------------------------------------


def test_parse_thinking():
    expected = assistant("2 + 2 = 4.", reasoning_content="Simple.", tool_calls=[])
    assert parse_completion(f"Simple.</think>2 + 2 = 4.{EOS}", True) == expected
    assert parse_completion("Simple.</think>2 + 2 = 4.", True) == expected
    assert parse_completion("4", False) == assistant("4", reasoning_content="", tool_calls=[])


def test_parse_tool_calls():
    first = invoke("f", ("text", "true", 'a "b"\nc'), ("n", "false", "[1, 2.50]"))
    block = calls_block(first, invoke("g"), invoke("h", ("x", "true", "")))
    message = parse_completion(f"Why.</think>Look.{block}{EOS}", True)
    assert (message["content"], message["reasoning_content"]) == ("Look.", "Why.")
    functions = [item["function"] for item in message["tool_calls"]]
    assert [function["name"] for function in functions] == ["f", "g", "h"]
    assert functions[0]["arguments"] == '{"text": "a \\"b\\"\\nc", "n": [1, 2.50]}'
    assert [json.loads(function["arguments"]) for function in functions[1:]] == [{}, {"x": ""}]


def test_parse_a_cut_completion():
    assert parse_completion("Still think", True, complete=False)["reasoning_content"] == "Still think"
    block = calls_block(invoke("f", ("a", "false", "1")), invoke("g", ("b", "true", "value")))
    for end in range(block.index(invoke("g", ("b", "true", "value"))), len(block) - len("</｜DSML｜tool_calls>")):
        calls = parse_completion("Look." + block[:end], False, complete=False)["tool_calls"]
        assert [item["function"]["name"] for item in calls] == ["f"]


F = invoke("f", ("a", "false", "1"))


@pytest.mark.parametrize(
    ("text", "thinking", "error"),
    [
        ("no end", True, "completion must be reasoning that ends with </think>, got 'no end'"),
        ("a<think>b", False, "completion content must be free of <think>, got 'a<think>b'"),
        (f"r{BOS}</think>b", True, f"completion reasoning must be free of {BOS}, got 'r{BOS}'"),
        (calls_block(F) + "more", False, "completion must be at its end after the tool calls, got 'more'"),
        (calls_block(F)[:-25], False, "tool call must be an invoke block with parameters, got "),
        (calls_block(F.replace(' string="false"', "")), False, "tool call must be an invoke block with parameters"),
        (
            calls_block(invoke("f", ("a", "false", "1"), ("a", "true", "1"))),
            False,
            "parameter of tool call 'f' must be given once, got 'a'",
        ),
        (
            calls_block(invoke("f", ("a", "false", "{1"))),
            False,
            "parameter 'a' of tool call 'f' must be JSON, got '{1'",
        ),
    ],
)
def test_bad_completions(text, thinking, error):
    with pytest.raises(ValueError) as caught:
        parse_completion(text, thinking)
    assert str(caught.value).startswith(error)


plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>｜"), max_size=20)
names = st.text(st.characters(categories=["Ll", "Lu", "Nd"]), min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(plain, plain, st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3), st.booleans())
def test_round_trip(reasoning, content, functions, thinking):
    calls = [call(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in functions]
    message = assistant(content, reasoning_content=reasoning if thinking else "", tool_calls=calls)
    prompt = encode_messages([user("u"), message], thinking=thinking)
    start = encode_messages([user("u")], thinking=thinking)
    assert prompt.startswith(start)
    assert parse_completion(prompt.removeprefix(start), thinking) == message
