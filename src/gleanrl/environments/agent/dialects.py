"""The APIs in which agents may call the model: OpenAI's chat completions and responses, and Anthropic's messages.

A request is refused if it asks for something that would change the answer and that the policy cannot do, such as a
forced tool call, a JSON schema, ``n = 2``, an image, or a parameter that the API does not have. Labels such as ``user``
are accepted and have no effect. The same holds for hints, whose effect no API promises: ``seed``, the effort of
thinking, and ``strict`` of a tool.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, Field, ValidationError

from gleanrl.rollout.calls import ModelAnswer, ModelCall, Refused
from gleanrl.types import Message


class Dialect(Protocol):
    """The API that an agent's client speaks."""

    path: str
    """Path of the API's requests, such as "/v1/chat/completions"."""

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        """Convert the body of a request to a model call.

        Raises:
            Refused: the body is malformed, or it asks for something that the policy cannot do.
        """
        ...

    def write(self, answer: ModelAnswer, call: ModelCall, model: str) -> dict[str, Any]:
        """Return the body of the response. ``model`` is the name of the model that the response states."""
        ...

    def stream(self, answer: ModelAnswer, call: ModelCall, model: str) -> Iterator[str]:
        """Yield the response as server-sent events, each with the empty line that ends it."""
        ...

    def error(self, refused: Refused) -> dict[str, Any]:
        """Return the body of the response to a call that is refused."""
        ...


UNPARSED = "unparsed_arguments"
"""Key of a tool call's ``input`` that holds the sampled text if it is not a JSON object. Only Anthropic's API needs it,
because there the input is an object and not a text."""


def _text(content: Any) -> str:
    """Return a content as one text. Every API allows a text, a list of parts, and, in some places, null."""
    if isinstance(content, str) or not isinstance(content, list | None):
        return content
    for part in content or ():
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str) or part.get("type") not in _TEXTS:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise Refused(f"a message with {kind!r:.40}: only text can be shown to the policy")
    return "".join(part["text"] for part in content or ())


def _representable(temperature: float) -> float:
    if 0 < temperature < 1e-6:  # a sampler divides by it in float32, and the result may not be finite
        raise Refused("temperature: 0, or a number from 1e-6 to 2")
    return temperature


_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_Text = Annotated[str, BeforeValidator(_text)]
_Count = Annotated[int, Field(ge=1)]
_Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_representable)]
_One = Annotated[float, Field(ge=1, le=1)]  # values of parameters that ask for nothing special
_Zero = Annotated[float, Field(ge=0, le=0)]
_Request = TypeVar("_Request", bound=BaseModel)


class _ToolCall(BaseModel):
    class Function(BaseModel):
        name: str
        arguments: str

    id: str
    type: Literal["function"] = "function"
    function: Function


class _Function(BaseModel):
    """The declaration of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, validation_alias=AliasChoices("parameters", "input_schema"))

    def schema_of_tool(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


def _validated(kind: type[_Request], body: Mapping[str, Any], place: str = "") -> _Request:
    """Return the request, or the part of one that is at ``place``. A parameter that is null counts as missing."""
    try:
        return kind.model_validate({key: value for key, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = place + ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise Refused(f"{path}: the policy has no such parameter") from None
        raise Refused(f"{path}: {first['msg']}, not {first['input']!r:.80}") from None


def _call(messages: Sequence[Message], tools: Sequence[_Function], *parameters: Any) -> ModelCall:
    """Return the call. The results of tools get the names of these tools from the calls before."""
    if not messages:
        raise Refused("the conversation is empty")
    names = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and (call_id := message.get("tool_call_id")) in names:
            message["name"] = names[call_id]
    schemas = tuple(tool.schema_of_tool() for tool in tools)
    try:
        json.dumps([messages, schemas], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused("the conversation has a lone surrogate, which tokenizers cannot encode") from None
    return ModelCall(tuple(messages), schemas, *parameters)


def _event(data: Mapping[str, Any]) -> str:
    """Return a server-sent event. Anthropic and OpenAI's responses also name the event."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"


def _openai_error(refused: Refused) -> dict[str, Any]:
    kind = "server_error" if refused.kind == "server" else "invalid_request_error"
    codes = {"authentication": "invalid_api_key", "context_length": "context_length_exceeded"}
    code = None if refused.kind == "invalid_request" else codes.get(refused.kind, refused.kind)
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": code}}


# --- OpenAI's chat completions ----------------------------------------------------------------------------------------
class _ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Text = ""
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None


class _ChatTool(BaseModel):
    type: Literal["function"]
    function: _Function


class _ChatRequest(BaseModel, extra="forbid"):
    messages: list[_ChatMessage]
    tools: list[_ChatTool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: _Temperature | None = None
    stop: Annotated[list[str], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = []
    stream: bool = False
    # These are allowed if they ask for nothing special.
    n: _One = 1
    top_p: _One = 1
    presence_penalty: _Zero = 0
    frequency_penalty: _Zero = 0
    logprobs: Literal[False] = False
    top_logprobs: _Zero = 0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] = {}
    parallel_tool_calls: Literal[True] = True
    response_format: Annotated[Any, AfterValidator(lambda value: _plain_format(value, "response_format"))] = None
    modalities: list[Literal["text"]] = []
    # These have no effect.
    model: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    seed: Any = None
    stream_options: Any = None
    service_tier: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


def _plain_format(value: Any, name: str) -> Any:
    if value not in (None, {"type": "text"}):
        raise Refused(f"{name}: the policy answers with plain text, not in the format {json.dumps(value):.80}")
    return value


class ChatCompletions:
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        request = _validated(_ChatRequest, body)
        messages = []
        for given in request.messages:
            role = "system" if given.role == "developer" else given.role
            message = Message(role=role, content=given.content)
            if given.reasoning_content and role == "assistant":
                message["reasoning_content"] = given.reasoning_content
            if given.tool_calls and role == "assistant":
                message["tool_calls"] = [call.model_dump() for call in given.tool_calls]
            if role == "tool":
                if given.tool_call_id is None:
                    raise Refused("a message with the role 'tool' that has no tool_call_id")
                message["tool_call_id"] = given.tool_call_id
                if given.name is not None:
                    message["name"] = given.name
            messages.append(message)
        return _call(
            messages,
            [] if request.tool_choice == "none" else [tool.function for tool in request.tools],
            request.max_completion_tokens or request.max_tokens,
            request.temperature,
            tuple(filter(None, request.stop)),
            request.stream,
        )

    def write(self, answer: ModelAnswer, call: ModelCall, model: str) -> dict[str, Any]:
        choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish, "logprobs": None}
        usage = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }
        head = {"id": f"chatcmpl-{answer.id}", "object": "chat.completion", "created": int(time.time())}
        return {**head, "model": model, "choices": [choice], "usage": usage}

    def stream(self, answer: ModelAnswer, call: ModelCall, model: str) -> Iterator[str]:
        whole = {**self.write(answer, call, model), "object": "chat.completion.chunk"}
        usage = whole.pop("usage")
        delta: dict[str, Any] = {**answer.message}
        if "tool_calls" in answer.message:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(answer.message["tool_calls"])]
        yield _event({**whole, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield _event({**whole, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}], "usage": usage})
        yield "data: [DONE]\n\n"

    def error(self, refused: Refused) -> dict[str, Any]:
        return _openai_error(refused)


# --- OpenAI's responses -----------------------------------------------------------------------------------------------
class _InputMessage(BaseModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text


class _Reasoning(BaseModel):
    type: Literal["reasoning"]
    summary: _Text = ""
    content: _Text = ""


class _FunctionCall(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _FunctionOutput(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: _Text


_ITEMS: Mapping[str, type[BaseModel]] = {
    "message": _InputMessage,
    "reasoning": _Reasoning,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionOutput,
}


class _FlatTool(_Function):
    type: Literal["function"]


class _ResponsesRequest(BaseModel, extra="forbid"):
    input: str | list[dict[str, Any]]
    instructions: _Text = ""
    tools: list[_FlatTool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_output_tokens: _Count | None = None
    temperature: _Temperature | None = None
    stream: bool = False
    # These are allowed if they ask for nothing special.
    top_p: _One = 1
    top_logprobs: _Zero = 0
    parallel_tool_calls: Literal[True] = True
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    include: list[Literal["reasoning.encrypted_content"]] = []
    text: Annotated[dict[str, Any], AfterValidator(lambda text: _plain_format(text.get("format"), "text.format"))] = {}
    # These have no effect. An answer is never stored, so a later call cannot name it.
    store: Any = None
    model: Any = None
    user: Any = None
    metadata: Any = None
    reasoning: Any = None
    stream_options: Any = None
    service_tier: Any = None
    max_tool_calls: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


class Responses:
    """OpenAI's responses.

    A conversation is the list of its items, which the client sends with every call. ``previous_response_id``,
    ``conversation`` and references to items are refused, because answers are not stored.
    """

    path = "/v1/responses"

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        for name in ("previous_response_id", "conversation"):
            if body.get(name) is not None:
                raise Refused(f"{name}: answers are not stored; send the whole conversation in input")
        request = _validated(_ResponsesRequest, body)
        messages = [Message(role="system", content=request.instructions)] if request.instructions else []
        given: Any = request.input
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        part = 0  # place that the item before has in an answer; 0 if it was not the assistant's
        for number, raw in enumerate(items):
            kind = str(raw.get("type") or "message")
            if kind not in _ITEMS:
                raise Refused(f"input.{number}: an item {kind!r:.40}, which the policy cannot read")
            item: Any = _validated(_ITEMS[kind], raw, f"input.{number}.")
            if kind == "function_call_output":
                messages.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
                part = 0
                continue
            if kind == "message" and item.role != "assistant":
                role = "system" if item.role == "developer" else item.role
                messages.append(Message(role=role, content=item.content))
                part = 0
                continue
            # An answer is up to one thought, up to one text and any number of calls, in this order.
            before, part = part, {"reasoning": 1, "message": 2, "function_call": 3}[kind]
            if not before or (part <= before and part < 3):
                messages.append(Message(role="assistant", content=""))
            answer = messages[-1]
            if kind == "reasoning":
                answer["reasoning_content"] = item.content or item.summary
            elif kind == "message":
                answer["content"] = item.content
            else:
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                answer.setdefault("tool_calls", []).append(call)
        tools = [] if request.tool_choice == "none" else request.tools
        return _call(messages, tools, request.max_output_tokens, request.temperature, (), request.stream)

    def write(self, answer: ModelAnswer, call: ModelCall, model: str) -> dict[str, Any]:
        message, key = answer.message, answer.id
        calls = message.get("tool_calls") or []
        status = "incomplete" if answer.finish == "length" else "completed"
        output: list[dict[str, Any]] = []
        if thought := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thought}]
            output.append({"id": f"rs_{key}", "type": "reasoning", "summary": [], "content": content})
        if message["content"] or not calls:
            content = [{"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}]
            head = {"id": f"msg_{key}", "type": "message", "role": "assistant"}
            output.append({**head, "status": status, "content": content})
        for number, entry in enumerate(calls):
            head = {"id": f"fc_{key}_{number}", "type": "function_call", "call_id": entry["id"]}
            output.append({**head, **entry["function"], "status": status})
        tools = [{"type": "function", "strict": False, **tool["function"]} for tool in call.tools]
        return {
            "id": f"resp_{key}",
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if answer.finish == "length" else None,
            "instructions": None,
            "max_output_tokens": call.max_tokens,
            "metadata": {},
            "model": model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": call.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": tools,
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": answer.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        }

    def stream(self, answer: ModelAnswer, call: ModelCall, model: str) -> Iterator[str]:
        whole = self.write(answer, call, model)
        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events: list[dict[str, Any]] = []
        for kind in ("response.created", "response.in_progress"):
            events.append({"type": kind, "response": begun})
        for index, item in enumerate(whole["output"]):
            where = {"item_id": item["id"], "output_index": index}
            started = {
                **item,
                "status": "in_progress",
                **({"arguments": ""} if "arguments" in item else {"content": []}),
            }
            events.append({"type": "response.output_item.added", "output_index": index, "item": started})
            if "arguments" in item:
                kind = "response.function_call_arguments"
                events.append({"type": f"{kind}.delta", **where, "delta": item["arguments"]})
                events.append({"type": f"{kind}.done", **where, "name": item["name"], "arguments": item["arguments"]})
            else:
                (part,) = item["content"]
                kind, where = f"response.{part['type']}", {**where, "content_index": 0}
                events.append({"type": "response.content_part.added", **where, "part": {**part, "text": ""}})
                events.append({"type": f"{kind}.delta", **where, "delta": part["text"], "logprobs": []})
                events.append({"type": f"{kind}.done", **where, "text": part["text"], "logprobs": []})
                events.append({"type": "response.content_part.done", **where, "part": part})
            events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        events.append({"type": f"response.{whole['status']}", "response": whole})
        for number, event in enumerate(events):
            yield _event({**event, "sequence_number": number})

    def error(self, refused: Refused) -> dict[str, Any]:
        return _openai_error(refused)


# --- Anthropic's messages ---------------------------------------------------------------------------------------------
class _Turn(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str | list[dict[str, Any]]


class _ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Text = ""


class _Thinking(BaseModel):
    type: Literal["thinking"]
    thinking: str


_BLOCKS: Mapping[str, tuple[str, type[BaseModel]]] = {
    "tool_use": ("assistant", _ToolUse),
    "thinking": ("assistant", _Thinking),
    "tool_result": ("user", _ToolResult),
}
"""Type of a block other than "text" -> the role in whose turns it may be, and its model."""


class _MessagesTool(_Function):
    type: Literal["custom"] = "custom"


class _ToolChoice(BaseModel):
    type: Literal["auto", "none"] = "auto"
    disable_parallel_tool_use: Literal[False] = False


class _MessagesRequest(BaseModel, extra="forbid"):
    messages: list[_Turn]
    max_tokens: _Count
    system: _Text = ""
    tools: list[_MessagesTool] = []
    tool_choice: _ToolChoice = _ToolChoice()
    temperature: _Temperature | None = None
    stop_sequences: list[str] = []
    stream: bool = False
    # These are allowed if they ask for nothing special.
    top_p: _One = 1
    output_config: Annotated[
        dict[str, Any], AfterValidator(lambda given: _plain_format(given.get("format"), "output_config.format"))
    ] = {}
    # These have no effect.
    model: Any = None
    metadata: Any = None
    thinking: Any = None
    service_tier: Any = None
    cache_control: Any = None
    inference_geo: Any = None
    speed: Any = None


class Messages:
    """Anthropic's messages."""

    path = "/v1/messages"

    def read(self, body: Mapping[str, Any]) -> ModelCall:
        request = _validated(_MessagesRequest, body)
        messages = [Message(role="system", content=request.system)] if request.system else []
        if request.messages and request.messages[-1].role == "assistant":
            raise Refused("messages: the last one is the assistant's, and the policy cannot continue a given answer")
        for number, turn in enumerate(request.messages):
            said: list[Mapping[str, Any]] = []  # blocks of text that no message has yet
            blocks = [{"type": "text", "text": turn.content}] if isinstance(turn.content, str) else turn.content
            answer = Message(role="assistant", content="")
            for index, raw in enumerate(blocks):
                if (kind := str(raw.get("type"))) not in _BLOCKS:
                    said.append(raw)
                    continue
                role, model = _BLOCKS[kind]
                if turn.role != role:
                    raise Refused(f"messages.{number}: a block {kind!r} in a message with the role {turn.role!r}")
                block: Any = _validated(model, raw, f"messages.{number}.content.{index}.")
                if kind == "thinking":
                    answer["reasoning_content"] = answer.get("reasoning_content", "") + block.thinking
                elif kind == "tool_use":
                    text = json.dumps(block.input, ensure_ascii=False)
                    if list(block.input) == [UNPARSED] and isinstance(block.input[UNPARSED], str):
                        text = block.input[UNPARSED]
                    call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": text}}
                    answer.setdefault("tool_calls", []).append(call)
                else:
                    if said:
                        messages.append(Message(role="user", content=_text(said)))
                        said = []
                    messages.append(Message(role="tool", content=block.content, tool_call_id=block.tool_use_id))
            if turn.role == "assistant":
                answer["content"] = _text(said)
                messages.append(answer)
            elif said or not blocks:
                messages.append(Message(role=turn.role, content=_text(said)))
        return _call(
            messages,
            [] if request.tool_choice.type == "none" else request.tools,
            request.max_tokens,
            request.temperature,
            tuple(filter(None, request.stop_sequences)),
            request.stream,
        )

    def write(self, answer: ModelAnswer, call: ModelCall, model: str) -> dict[str, Any]:
        message = answer.message
        calls = message.get("tool_calls") or []
        content: list[dict[str, Any]] = []
        if thought := message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": thought, "signature": "unsigned"})
        if message["content"] or not calls:
            content.append({"type": "text", "text": message["content"]})
        for entry in calls:
            text = entry["function"]["arguments"]
            try:
                arguments = json.loads(text or "{}")
                json.dumps(arguments, allow_nan=False)  # infinite numbers are not JSON
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                arguments = {UNPARSED: text}
            name = entry["function"]["name"]
            content.append({"type": "tool_use", "id": entry["id"], "name": name, "input": arguments})
        reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish]
        stopped = answer.stop if answer.finish == "stop" else None
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": content,
            "stop_reason": reason if stopped is None else "stop_sequence",
            "stop_sequence": stopped,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
        }

    def stream(self, answer: ModelAnswer, call: ModelCall, model: str) -> Iterator[str]:
        whole = self.write(answer, call, model)
        usage = {**whole["usage"], "output_tokens": 0}
        begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event({"type": "message_start", "message": begun})
        for index, block in enumerate(whole["content"]):
            if block["type"] == "text":
                empty, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
            elif block["type"] == "thinking":
                empty = {**block, "thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": block["signature"]},
                ]
            else:
                text = json.dumps(block["input"])
                empty, deltas = {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
            yield _event({"type": "content_block_start", "index": index, "content_block": empty})
            for delta in deltas:
                yield _event({"type": "content_block_delta", "index": index, "delta": delta})
            yield _event({"type": "content_block_stop", "index": index})
        end = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        yield _event({"type": "message_delta", "delta": end, "usage": whole["usage"]})
        yield _event({"type": "message_stop"})

    def error(self, refused: Refused) -> dict[str, Any]:
        kinds = {"authentication": "authentication_error", "too_large": "request_too_large", "server": "api_error"}
        kind = kinds.get(refused.kind, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused), "code": refused.kind}}


DIALECTS: Sequence[Dialect] = (ChatCompletions(), Responses(), Messages())
"""All dialects. None of them has state, so one of each serves all episodes."""
