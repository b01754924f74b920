"""The chat template of the pretended model: ChatML, and where an answer is continued."""

from __future__ import annotations

from typing import Any

import msgspec
from attrs import frozen

from kvalet.sims.fakeserver.constants import IMAGE_TOKENS
from kvalet.sims.fakeserver.refusals import Refused

_PICTURE = "<|image|>" * IMAGE_TOKENS


@frozen(kw_only=True)
class Rendered:
    """A chat as a prompt. ``partial``: the text of an answer that is continued, and whether a
    stream ``repeats`` it."""

    prompt: str
    partial: str = ""
    repeats: bool = False


def render(body: dict[str, Any], *, pictures: bool) -> Rendered:
    """The prompt of a chat request. Raises Refused; ``pictures``: there is a projector."""
    if body.get("messages") is None:
        raise Refused(400, "'messages' is required")
    turns = [_turn(message, pictures) for message in objects(body["messages"], "messages")]
    go_on = body.get("continue_final_message", False)
    generate = body.get("add_generation_prompt", True)
    if go_on and generate:
        raise Refused(
            400, "Cannot set both add_generation_prompt and continue_final_message to true."
        )
    last = len(turns) > 0 and turns[-1][0] == "assistant"
    continued = (
        last and bool(turns[-1][1]) and (bool(go_on) or "continue_final_message" not in body)
    )
    done = turns[:-1] if continued else turns
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in done)
    if continued:
        partial = turns[-1][1]
        return Rendered(
            prompt=f"{text}<|im_start|>assistant\n{partial}", partial=partial, repeats=not go_on
        )
    return Rendered(prompt=text + ("<|im_start|>assistant\n" if generate else ""))


def objects(value: object, name: str) -> list[dict[str, Any]]:
    """``value`` as a list of objects. Raises Refused, which calls it ``name``."""
    try:
        return msgspec.convert(value, list[dict[str, Any]])
    except msgspec.ValidationError:
        raise Refused(400, f"Expected '{name}' to be an array of objects") from None


def _turn(message: dict[str, Any], pictures: bool) -> tuple[str, str]:
    match message:
        case {"role": str(role), "content": str(text)}:
            return role, text
        case {"role": str(role), "content": list()}:
            parts = objects(message["content"], "content")
            return role, "".join(_part(part, pictures) for part in parts)
        case {"role": str(role)}:
            return role, ""
        case _:
            raise Refused(400, "Missing 'role' in message")


def _part(part: dict[str, Any], pictures: bool) -> str:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "image_url" | "input_image" | "image"} if pictures:
            return _PICTURE
        case {"type": "image_url" | "input_image" | "image"}:
            raise Refused(
                500,
                "image input is not supported - hint: if this is unexpected, you may need to "
                "provide the mmproj",
            )
        case _:
            raise Refused(400, "unsupported content[].type")
