"""The forms of published chat templates, with the tokens of answers that a loss should count.

A form says what a template writes for each turn. `{c}` is the content of a turn, and `{s}` that of
the system. Brackets ⟦ ⟧ are around what a model generates: the answer and the token that ends it.
"""

import dataclasses
import json
import re

OPEN, CLOSE = "⟦", "⟧"
# Tokens of templates. All others are bytes.
MARKERS = re.compile(
    r"<\|[^|<>]+\|>|<｜[^｜<>]+｜>|\[\|[a-z]+\|\]|</?[A-Za-z_用户]+(?:_?\d+)?>|<seed:\w+>"
    r"|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Zg][A-Z_a-z]+\]|\]~b\]|\[e~\["
)


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of templates.

    Attributes:
      user: a turn of the user.
      answer: a turn of the assistant.
      prompt: the beginning of an answer.
      ends: tokens that end generation, as generation_config.json lists them.
      system: a turn of the system; "" if there is none.
      begin: the beginning of a text.
      first: the first turn of the user with the system's; "" if the system has a turn of its own.
      last: the last turn of the assistant; "" if it is written as all others.
      closing: the end of a text, unless an answer begins.
      always: whether each text ends with the beginning of an answer.
      added: the token that the last answer has besides; "" for none.
      next_ends: whether the first token of the next turn ends an answer.
      call: a turn of the assistant that calls a function; "" for none.
      result: the turn with the function's result.
      thought: what stands before an answer with a thought, `{r}`; "" for none.
    """

    user: str
    answer: str
    prompt: str
    ends: tuple[str, ...]
    system: str = ""
    begin: str = ""
    first: str = ""
    last: str = ""
    closing: str = ""
    always: bool = False
    added: str = ""
    next_ends: bool = False
    call: str = ""
    result: str = ""
    thought: str = ""

    def source(self) -> str:
        """Returns a template of this form in Jinja."""
        parts = [
            ("m.role == 'system'", self.system),
            ("m.role == 'user' and loop.index0 == 1 and system", self.first or self.user),
            ("m.role == 'user'", self.user),
            ("m.role == 'tool'", self.result),
            ("m.tool_calls", self.call),
            ("loop.last", self.last or self.answer),
            ("true", self.answer),
        ]
        branches = "{% elif ".join(f"{test} %}}{_written(text)}" for test, text in parts)
        prompt, closing = _written(self.prompt), _written(self.closing)
        tail = f"{{% if {str(not self.always).lower()} and not add_generation_prompt %}}"
        return (
            "{% set system = messages and messages[0].role == 'system' and messages[0].content %}"
            f"{_written(self.begin)}{{% for m in messages %}}"
            f"{{% if m.reasoning %}}{_written(self.thought)}{{% endif %}}"
            f"{{% if {branches}{{% endif %}}"
            f"{{% endfor %}}{tail}{closing}{{% else %}}{prompt}{{% endif %}}"
        )

    def expected(self, messages: list[dict]) -> str:
        """Returns the text of a conversation with brackets around what counts."""
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        text, open_end = self.begin, False
        for place, message in enumerate(messages):
            is_last = place + 1 == len(messages)
            form = {"system": self.system, "user": self.user, "tool": self.result}.get(
                message["role"], (is_last and self.last) or self.answer
            )
            form = self.call if "tool_calls" in message else form
            if message["role"] == "user" and place == 1 and system:
                form = self.first or self.user
            written = form.replace("{c}", message["content"]).replace("{s}", system)
            if open_end:
                marker = MARKERS.match(written)
                assert marker
                written = f"{OPEN}{marker[0]}{CLOSE}{written[marker.end() :]}"
            open_end = self.next_ends and message["role"] == "assistant"
            text += written
        added = "<|observation|>" if self.next_ends and self.call == form else self.added
        tail = self.prompt if self.always and not added else self.closing
        return text + tail + (f"{OPEN}{added}{CLOSE}" if added else "")


def _written(text: str) -> str:
    """Returns the expressions in Jinja that write a text of a form."""
    found = []
    for part in re.split(r"(\{[crs]\})", text.replace(OPEN, "").replace(CLOSE, "")):
        value = {"{c}": "m.content", "{r}": "m.reasoning", "{s}": "system"}.get(part)
        found.append(f"{{{{ {value or json.dumps(part, ensure_ascii=False)} }}}}")
    return "".join(found)


def _turns(user, assistant, end, between="", begin="", **more) -> Form:
    """Returns a form whose turns are a header, the content and an end."""
    defaults = {"system": f"{more.pop('system_header', '')}{{c}}{end}{between}", "ends": (end,)}
    if not defaults["system"].startswith(("<", "[", "]")):
        defaults["system"] = ""
    return Form(
        user=f"{user}{{c}}{end}{between}",
        answer=f"{assistant}{OPEN}{{c}}{end}{CLOSE}{between}",
        prompt=more.pop("prompt", assistant),
        begin=begin,
        **(defaults | more),
    )


def _chatml(**more) -> Form:
    start = "<|im_start|>"
    return _turns(
        f"{start}user\n",
        f"{start}assistant\n",
        "<|im_end|>",
        "\n",
        system_header=f"{start}system\n",
        **more,
    )


def _gemma_4(**more) -> Form:
    return _turns(
        "<|turn>user\n",
        "<|turn>model\n",
        "<turn|>",
        "\n",
        begin="<bos>",
        system_header="<|turn>system\n",
        ends=("<eos>", "<turn|>"),
        **more,
    )


def _lines(user: str, assistant: str, end: str, **more) -> Form:
    """Returns a form with names of roles in plain text, and an end after answers only."""
    answer = f"{assistant.rstrip()}{OPEN}{assistant[len(assistant.rstrip()) :]}{{c}}{end}{CLOSE}"
    return Form(user, answer, assistant.rstrip(), **({"ends": (end,)} | more))


_CALL, _RESULT = (
    '<tool_call>\n{"name": "f"}\n</tool_call>',
    "<tool_response>\n{c}\n</tool_response>",
)
_EOS = "<｜end▁of▁sentence｜>"

FORMS = {
    "chatml": _chatml(),
    "chatml of a base model": _chatml(ends=("<|endoftext|>",)),
    "chatml without a prompt": _chatml(prompt=""),
    "qwen 2.5": _chatml(
        ends=("<|im_end|>", "<|endoftext|>"),
        call=f"<|im_start|>assistant\n{OPEN}{{c}}\n{_CALL}<|im_end|>{CLOSE}\n",
        result=f"<|im_start|>user\n{_RESULT}<|im_end|>\n",
    ),
    "internlm 2": _chatml(begin="<s>", ends=("</s>", "<|im_end|>")),
    "lfm 2": _chatml(begin="<|startoftext|>"),
    "llama 2": Form(
        user="<s>[INST] {c} [/INST]",
        first="<s>[INST] <<SYS>>\n{s}\n<</SYS>>\n\n{c} [/INST]",
        answer=f"{OPEN} {{c}} </s>{CLOSE}",
        prompt="",
        ends=("</s>",),
    ),
    "llama 3": _turns(
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        begin="<|begin_of_text|>",
        system_header="<|start_header_id|>system<|end_header_id|>\n\n",
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        call="<|start_header_id|>assistant<|end_header_id|>\n\n"
        f'{OPEN}{{"name": "f"}}<|eot_id|>{CLOSE}',
        result="<|start_header_id|>ipython<|end_header_id|>\n\n{c}<|eot_id|>",
    ),
    "llama 3, which always begins an answer": _turns(
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        always=True,
    ),
    "llama 4": _turns(
        "<|header_start|>user<|header_end|>\n\n",
        "<|header_start|>assistant<|header_end|>\n\n",
        "<|eot|>",
        system_header="<|header_start|>system<|header_end|>\n\n",
    ),
    "mistral 1": Form(" [INST] {c} [/INST]", f"{OPEN} {{c}}</s>{CLOSE}", "", ("</s>",)),
    "mistral 3": Form(
        "[INST] {c}[/INST]",
        f"{OPEN} {{c}}</s>{CLOSE}",
        "",
        ("</s>",),
        begin="<s>",
        call=f'{OPEN}[TOOL_CALLS] [{{"name": "f"}}]</s>{CLOSE}',
        result="[TOOL_RESULTS] {c}[/TOOL_RESULTS]",
    ),
    "mistral tekken": Form(
        "[INST]{c}[/INST]",
        f"{OPEN}{{c}}</s>{CLOSE}",
        "",
        ("</s>",),
        system="[SYSTEM_PROMPT]{c}[/SYSTEM_PROMPT]",
    ),
    "zephyr": _turns("<|user|>\n", "<|assistant|>\n", "</s>", "\n", system_header="<|system|>\n"),
    "phi 3": _turns(
        "<|user|>\n",
        "<|assistant|>\n",
        "<|end|>",
        "\n",
        system_header="<|system|>\n",
        last=f"<|assistant|>\n{OPEN}{{c}}<|end|>\n<|endoftext|>{CLOSE}",
        ends=("<|endoftext|>", "<|assistant|>", "<|end|>"),
    ),
    "phi 3 with one end": _turns(
        "<|user|>\n",
        "<|assistant|>\n",
        "<|end|>",
        "\n",
        last=f"<|assistant|>\n{OPEN}{{c}}<|end|>\n<|endoftext|>{CLOSE}",
        ends=("<|endoftext|>",),
    ),
    "an end after the last turn only": Form(
        "<|user|>\n{c}\n",
        f"<|assistant|>\n{OPEN}{{c}}\n{CLOSE}",
        "<|assistant|>\n",
        ("<|endoftext|>",),
        last=f"<|assistant|>\n{OPEN}{{c}}\n<|endoftext|>{CLOSE}",
    ),
    "phi 3 medium": Form(
        "<|user|>\n{c}<|end|>\n<|assistant|>\n",
        f"{OPEN}{{c}}<|end|>{CLOSE}\n",
        "",
        ("<|endoftext|>", "<|end|>"),
    ),
    "phi 4": Form(
        "<|im_start|>user<|im_sep|>{c}<|im_end|><|im_start|>assistant<|im_sep|>",
        f"{OPEN}{{c}}<|im_end|>{CLOSE}",
        "",
        ("<|im_end|>",),
    ),
    "phi 4 mini": _turns(
        "<|user|>",
        "<|assistant|>",
        "<|end|>",
        last=f"<|assistant|>{OPEN}{{c}}<|end|><|endoftext|>{CLOSE}",
        ends=("<|end|>", "<|endoftext|>"),
    ),
    "gemma": _turns(
        "<start_of_turn>user\n",
        "<start_of_turn>model\n",
        "<end_of_turn>",
        "\n",
        begin="<bos>",
        first="<start_of_turn>user\n{s}\n\n{c}<end_of_turn>\n",
        ends=("<eos>", "<end_of_turn>"),
    ),
    "gemma 4": _gemma_4(),
    "gemma 4 without thoughts": _gemma_4(prompt="<|turn>model\n<|channel>thought\n<channel|>"),
    "deepseek 2": _lines("User: {c}\n\n", "Assistant: ", _EOS, begin="<｜begin▁of▁sentence｜>"),
    "deepseek 3": Form(
        "<｜User｜>{c}",
        f"<｜Assistant｜>{OPEN}{{c}}{_EOS}{CLOSE}",
        "<｜Assistant｜>",
        (_EOS,),
    ),
    "deepseek r1": Form(
        "<｜User｜>{c}",
        f"<｜Assistant｜>{OPEN}{{c}}{_EOS}{CLOSE}",
        "<｜Assistant｜><think>\n",
        (_EOS,),
    ),
    "deepseek coder": Form(
        "### Instruction:\n{c}\n",
        f"### Response:{OPEN}\n{{c}}\n<|EOT|>{CLOSE}\n",
        "### Response:",
        ("<|EOT|>",),
    ),
    "command r": _turns(
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        system_header="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>",
    ),
    "command r7b": Form(
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{c}<|END_OF_TURN_TOKEN|>",
        f"<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{OPEN}<|START_RESPONSE|>{{c}}"
        f"<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{CLOSE}",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ("<|END_OF_TURN_TOKEN|>",),
    ),
    "glm 4": Form(
        "<|user|>\n{c}",
        f"<|assistant|>{OPEN}\n{{c}}{CLOSE}",
        "<|assistant|>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        system="<|system|>\n{c}",
        begin="[gMASK]<sop>",
        added="<|user|>",
        next_ends=True,
        call=f"<|assistant|>{OPEN}\n<think></think>\n<tool_call>f\n</tool_call>{CLOSE}",
        result="<|observation|>\n<tool_response>\n{c}\n</tool_response>",
    ),
    "glm 4.7": Form(
        "<|user|>{c}",
        f"<|assistant|></think>{OPEN}{{c}}{CLOSE}",
        "<|assistant|><think>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        system="<|system|>{c}",
        begin="[gMASK]<sop>",
        added="<|user|>",
        next_ends=True,
        call=f"<|assistant|></think>{OPEN}<tool_call>f</tool_call>{CLOSE}",
        result="<|observation|><tool_response>{c}</tool_response>",
    ),
    "glm edge": Form(
        "<|user|>\n{c}",
        f"<|assistant|>{OPEN}\n{{c}}{CLOSE}",
        "<|assistant|>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        always=True,
        added="<|user|>",
        next_ends=True,
    ),
    "chatglm 3": Form(
        "<|user|>\n {c}",
        f"<|assistant|>{OPEN}\n {{c}}{CLOSE}",
        "<|assistant|>",
        ("</s>",),
        begin="[gMASK]<sop>",
        added="</s>",
        next_ends=True,
    ),
    "minicpm": Form(
        "<用户>{c}<AI>", f"{OPEN}{{c}}{CLOSE}", "", ("</s>",), added="</s>", next_ends=True
    ),
    "baichuan 2": Form(
        "<reserved_106>{c}",
        f"<reserved_107>{OPEN}{{c}}{CLOSE}",
        "<reserved_107>",
        ("</s>",),
        added="</s>",
        next_ends=True,
    ),
    "falcon": Form(
        "\nUser: {c}",
        f"\nFalcon:{OPEN} {{c}}{CLOSE}",
        "\nFalcon:",
        ("<|endoftext|>",),
        added="<|endoftext|>",
    ),
    "ling": Form(
        "<role>HUMAN</role>{c}",
        f"<role>ASSISTANT</role>{OPEN}{{c}}{CLOSE}",
        "<role>ASSISTANT</role>",
        ("<|endoftext|>",),
        added="<|endoftext|>",
    ),
    "nemotron mini": Form(
        "<extra_id_1>User\n{c}\n",
        f"<extra_id_1>Assistant\n{OPEN}{{c}}\n{CLOSE}",
        "<extra_id_1>Assistant\n",
        ("</s>",),
        added="</s>",
    ),
    "vicuna": _lines("USER: {c} ", "ASSISTANT: ", "</s>"),
    "openchat": Form(
        "GPT4 Correct User: {c}<|end_of_turn|>",
        f"GPT4 Correct Assistant:{OPEN} {{c}}<|end_of_turn|>{CLOSE}",
        "GPT4 Correct Assistant:",
        ("<|end_of_turn|>",),
    ),
    "orion": Form(
        "Human: {c}\n\nAssistant: </s>", f"{OPEN}{{c}}</s>{CLOSE}", "", ("</s>",), begin="<s>"
    ),
    "solar": _lines("### User:\n{c}\n\n", "### Assistant:\n", "</s>"),
    "granite": _turns(
        "<|start_of_role|>user<|end_of_role|>",
        "<|start_of_role|>assistant<|end_of_role|>",
        "<|end_of_text|>",
        "\n",
        system_header="<|start_of_role|>system<|end_of_role|>",
    ),
    "exaone": Form(
        "[|user|]{c}\n",
        f"[|assistant|]{OPEN}{{c}}[|endofturn|]{CLOSE}\n",
        "[|assistant|]",
        ("[|endofturn|]",),
        system="[|system|]{c}[|endofturn|]\n",
    ),
    "hunyuan": Form(
        "<｜hy_User｜>{c}",
        f"<｜hy_Assistant｜>{OPEN}{{c}}<｜hy_end｜>{CLOSE}",
        "<｜hy_Assistant｜>",
        ("<｜hy_end｜>",),
    ),
    "hy 3": Form(
        "<｜hy_User｜>{c}",
        f"<｜hy_Assistant｜><think></think>{OPEN}{{c}}<｜hy_eos｜>{CLOSE}",
        "<｜hy_Assistant｜><think></think>",
        ("<｜hy_eos｜>",),
        begin="<｜hy_begin▁of▁sentence｜>",
        last=f"<｜hy_Assistant｜><think></think>{OPEN}{{c}}{CLOSE}",
        added="<｜hy_eos｜>",
    ),
    "solar open": Form(
        "<|begin|>user<|content|>{c}<|end|>",
        f"<|begin|>assistant{OPEN}<|content|>{{c}}<|end|>{CLOSE}",
        "<|begin|>assistant",
        ("<|endoftext|>", "<|flush|>", "<|calls|>"),
        system="<|begin|>system<|content|>{c}<|end|>",
        added="<|endoftext|>",
        thought="<|begin|>assistant<|think|>{r}<|end|>",
    ),
    "ernie 4.5": Form(
        "User: {c}\n",
        f"Assistant: {OPEN}{{c}}<|end_of_sentence|>{CLOSE}",
        "Assistant: ",
        ("<|end_of_sentence|>",),
        begin="<|begin_of_sentence|>",
    ),
    "minimax m2": _turns("]~b]user\n", "]~b]ai\n", "[e~[", "\n", system_header="]~b]system\n"),
    "kimi k2": _turns(
        "<|im_user|>user<|im_middle|>",
        "<|im_assistant|>assistant<|im_middle|>",
        "<|im_end|>",
        system_header="<|im_system|>system<|im_middle|>",
    ),
    "gpt-oss": Form(
        "<|start|>user<|message|>{c}<|end|>",
        f"<|start|>assistant{OPEN}<|channel|>final<|message|>{{c}}<|end|>{CLOSE}",
        "<|start|>assistant",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        system="<|start|>system<|message|>{c}<|end|>",
        last=f"<|start|>assistant{OPEN}<|channel|>final<|message|>{{c}}<|return|>{CLOSE}",
        call=f"<|start|>assistant{OPEN} to=f<|channel|>commentary<|message|>{{}}<|call|>{CLOSE}",
        result="<|start|>f to=assistant<|channel|>commentary<|message|>{c}<|end|>",
    ),
    "jamba": Form(
        "<|bom|><|user|> {c}<|eom|>",
        f"<|bom|><|assistant|>{OPEN} {{c}}<|eom|>{CLOSE}",
        "<|bom|><|assistant|>",
        ("<|endoftext|>", "<|eom|>"),
        begin="<|startoftext|>",
    ),
    "apertus": Form(
        "<|user_start|>{c}<|user_end|>",
        f"<|assistant_start|>{OPEN}{{c}}<|assistant_end|>{CLOSE}",
        "<|assistant_start|>",
        ("<|assistant_end|>",),
    ),
    "olmo": Form(
        "<|user|>\n{c}\n",
        f"<|assistant|>\n{OPEN}{{c}}<|endoftext|>{CLOSE}\n",
        "<|assistant|>\n",
        ("<|endoftext|>",),
        begin="<|endoftext|>",
        last=f"<|assistant|>\n{OPEN}{{c}}<|endoftext|>{CLOSE}",
    ),
    "megrez": _turns(
        "<|role_start|>user<|role_end|>", "<|role_start|>assistant<|role_end|>", "<|turn_end|>"
    ),
    "seed-oss": _turns("<seed:bos>user\n", "<seed:bos>assistant\n", "<seed:eos>"),
    "monarch": _turns("<s>user\n", "<s>assistant\n", "</s>", "\n", system_header="<s>system\n"),
    "gigachat": _turns("user<|role_sep|>", "assistant<|role_sep|>", "<|message_sep|>"),
    "reka": Form(
        "human: {c} <sep> ",
        f"assistant:{OPEN} {{c}} <sep>{CLOSE} ",
        "assistant:",
        ("<sep>",),
    ),
    "xverse": Form(
        "Human: {c}\n\nAssistant: ", f"{OPEN}{{c}}<|endoftext|>{CLOSE}", "", ("<|endoftext|>",)
    ),
    "stablelm 2": _turns("<|user|>\n", "<|assistant|>\n", "<|endoftext|>", "\n"),
    "hermes with a thought": _chatml(
        call=f"<|im_start|>assistant\n{OPEN}<think>\nhm\n</think>\n{_CALL}<|im_end|>{CLOSE}\n",
        result=f"<|im_start|>tool\n{_RESULT}<|im_end|>\n",
    ),
}
