"""fairseq's tokenizers: a SentencePiece model with other first tokens, followed by languages and a mask token.

The languages and the position of the language token are defined by the code of the tokenizer's class. Here they are
data; other classes are refused. `src_lang` names the language of the source; some classes have a default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.tokenizer.layout import AddedToken
from penstock_server.tokenizer.sentencepiece_file import read_sentencepiece
from penstock_server.tokenizer.sentencepiece_json import (
    CONTROL,
    UNKNOWN,
    Piece,
    Vocabulary,
    spaced_json,
    t5_json,
    whole_tokens,
)
from penstock_server.tokenizer.settings import BART, Settings, Style

FAIRSEQ_FILE = "sentencepiece.bpe.model"
SENTENCEPIECE_FIRST = ["<unk>", "<s>", "</s>"]  # the file's first pieces, which fairseq replaces by four others
LANGUAGE = "src_lang"


@dataclass(frozen=True, slots=True)
class Class:
    """What a tokenizer class adds to such a vocabulary."""

    prefix: tuple[str, ...]
    suffix: tuple[str, ...]
    languages: str = ""  # languages that no file lists
    default: str = ""  # the source language if no file names it
    only_spaces_separate: bool = False


MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
MBART50 = (
    f"{MBART} af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE "
    "sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
END = ("eos_token",)
CLASSES = {
    "MBart": Class((), (*END, LANGUAGE), MBART, "en_XX"),
    "MBart50": Class((LANGUAGE,), END, MBART50, "en_XX", only_spaces_separate=True),
    "Nllb": Class((LANGUAGE,), END, "", "eng_Latn", only_spaces_separate=True),
    "XLMRoberta": Class(("bos_token",), END),
}
# model_type → class, for folders that do not name the class
CLASSES_BY_MODEL = {"mbart": "MBart", "mbart50": "MBart50", "nllb": "Nllb", "xlm-roberta": "XLMRoberta"}


def fairseq_json(path: Path, settings: Settings) -> dict[str, Any]:
    """Builds `tokenizer.json`. Raises ConfigError when the file is damaged, or its class or languages are unknown."""
    class_ = _class(path, settings)
    style = Style(class_.prefix, class_.suffix, (*BART.defaults, (LANGUAGE, class_.default)))
    values = {key: value for key, value in settings.values.items() if key != LANGUAGE or value}
    settings = replace(settings, style=style, values=values)
    vocabulary = _in_fairseq_order(path, read_sentencepiece(path), settings)
    ids = {piece.text: id_ for id_, piece in enumerate(vocabulary.pieces)}
    named = [text for text in settings.special_tokens() if text not in ids and text != settings.token("mask_token")]
    languages = list(dict.fromkeys([*class_.languages.split(), *named]))
    if LANGUAGE in (*class_.prefix, *class_.suffix) and settings.token(LANGUAGE) not in languages:
        raise ConfigError(
            f"{path}: the source language {settings.token(LANGUAGE)!r} is not among the {len(languages)} known "
            "languages; tokenizer_config.json lists them under additional_special_tokens and names the source language "
            "under src_lang"
        )
    added = [AddedToken(0, text, special=True) for text in languages]
    added.append(AddedToken(0, settings.token("mask_token") or "", special=True, lstrip=True, normalized=True))
    listed = {entry["content"] for entry in settings.added.values()}
    placed = [replace(token, id=id_) for id_, token in enumerate(added, len(ids)) if token.content not in listed]
    parts = spaced_json(vocabulary) if class_.only_spaces_separate else t5_json(vocabulary)
    return settings.complete(parts, ids, whole_tokens(vocabulary) + placed)


def _class(path: Path, settings: Settings) -> Class:
    name = settings.class_name.removesuffix("Fast").removesuffix("Tokenizer")
    name = name or CLASSES_BY_MODEL.get(settings.model_type, "")
    if name not in CLASSES:
        raise ConfigError(
            f"{path} is a fairseq vocabulary, and the tokenizer class {settings.class_name or '(not named)'} is not "
            f"supported; supported: {', '.join(CLASSES)}; add a tokenizer.json to the folder"
        )
    class_ = CLASSES[name]
    if name == "Nllb" and settings.values.get("legacy_behaviour", False):
        return replace(class_, prefix=(), suffix=(*END, LANGUAGE))
    return class_


def _in_fairseq_order(path: Path, vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    first = [piece.text for piece in vocabulary.pieces[: len(SENTENCEPIECE_FIRST)]]
    if first != SENTENCEPIECE_FIRST:
        raise ConfigError(f"{path} begins with {first}; a fairseq vocabulary begins with {SENTENCEPIECE_FIRST}")
    roles = {"bos_token": CONTROL, "pad_token": CONTROL, "eos_token": CONTROL, "unk_token": UNKNOWN}
    special = [Piece(settings.token(role) or "", 0.0, type_) for role, type_ in roles.items()]
    return replace(vocabulary, pieces=[*special, *vocabulary.pieces[len(SENTENCEPIECE_FIRST) :]], byte_fallback=False)
