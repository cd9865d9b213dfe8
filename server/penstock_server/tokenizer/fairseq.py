"""fairseq's tokenizers: a SentencePiece model with fairseq's own first tokens, and languages and a mask behind it.

Which languages there are, and where a source's stands, is in the code of the tokenizer's class: here it is data, and a
class that is not in it is refused. A source is of the language that `src_lang` names; a class without it has its own.
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
THEIR_FIRST = ["<unk>", "<s>", "</s>"]  # in the file, where fairseq has four others
LANGUAGE = "src_lang"


@dataclass(frozen=True, slots=True)
class Class:
    """A tokenizer whose vocabulary is such a file."""

    before: tuple[str, ...]
    behind: tuple[str, ...]
    languages: str = ""  # where no file lists them
    default: str = ""  # the language of sources where no file says it
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
# model_type → class, for folders that do not name it
CLASSES_BY_MODEL = {"mbart": "MBart", "mbart50": "MBart50", "nllb": "Nllb", "xlm-roberta": "XLMRoberta"}


def fairseq_json(path: Path, settings: Settings) -> dict[str, Any]:
    """Raises ConfigError when the file is damaged, or nothing says what its languages are or where they stand."""
    class_ = _class(path, settings)
    style = Style(class_.before, class_.behind, (*BART.defaults, (LANGUAGE, class_.default)))
    values = {key: value for key, value in settings.values.items() if key != LANGUAGE or value}
    settings = replace(settings, style=style, values=values)
    vocabulary = _in_their_order(path, read_sentencepiece(path), settings)
    ids = {piece.text: id_ for id_, piece in enumerate(vocabulary.pieces)}
    named = [text for text in settings.special_tokens() if text not in ids and text != settings.token("mask_token")]
    languages = list(dict.fromkeys([*class_.languages.split(), *named]))
    if LANGUAGE in (*class_.before, *class_.behind) and settings.token(LANGUAGE) not in languages:
        raise ConfigError(
            f"{path}: sources are of the language {settings.token(LANGUAGE)!r}, which is none of the "
            f"{len(languages)} that are known; tokenizer_config.json lists them under additional_special_tokens, and "
            "names that of sources under src_lang"
        )
    behind = [AddedToken(0, text, special=True) for text in languages]
    behind.append(AddedToken(0, settings.token("mask_token") or "", special=True, lstrip=True, normalized=True))
    listed = {entry["content"] for entry in settings.added.values()}
    placed = [replace(token, id=id_) for id_, token in enumerate(behind, len(ids)) if token.content not in listed]
    parts = spaced_json(vocabulary) if class_.only_spaces_separate else t5_json(vocabulary)
    return settings.complete(parts, ids, whole_tokens(vocabulary) + placed)


def _class(path: Path, settings: Settings) -> Class:
    name = settings.class_name.removesuffix("Fast").removesuffix("Tokenizer")
    name = name or CLASSES_BY_MODEL.get(settings.model_type, "")
    if name not in CLASSES:
        raise ConfigError(
            f"{path} is a vocabulary of fairseq's, and what {settings.class_name or 'its tokenizer'} adds to it is not "
            f"known; known: {', '.join(CLASSES)}; give the folder a tokenizer.json"
        )
    class_ = CLASSES[name]
    if name == "Nllb" and settings.values.get("legacy_behaviour", False):
        return replace(class_, before=(), behind=(*END, LANGUAGE))
    return class_


def _in_their_order(path: Path, vocabulary: Vocabulary, settings: Settings) -> Vocabulary:
    first = [piece.text for piece in vocabulary.pieces[: len(THEIR_FIRST)]]
    if first != THEIR_FIRST:
        raise ConfigError(f"{path} begins with {first}, and fairseq's vocabularies with {THEIR_FIRST}")
    roles = {"bos_token": CONTROL, "pad_token": CONTROL, "eos_token": CONTROL, "unk_token": UNKNOWN}
    ours = [Piece(settings.token(role) or "", 0.0, type_) for role, type_ in roles.items()]
    return replace(vocabulary, pieces=[*ours, *vocabulary.pieces[len(THEIR_FIRST) :]], byte_fallback=False)
