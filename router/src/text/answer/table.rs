//! The known tool-call formats. Detection takes the first one that understands what the template writes.
//!
//! Sources: the models' published templates and cards, and the tool parsers of vLLM and SGLang.

use super::call_item::Item;
use super::format::{
    Addressee, Body, CallIds, Channels, Elements, Encoding, Format, Layout, Literals, Run, Tags, Types,
};

const fn object(name_key: &'static str, arguments_key: &'static str) -> Body {
    Body::Object { name_key, arguments_key, index_key: None }
}

const ARGUMENTS: Body = object("\"name\"", "\"arguments\"");

const RUN: Run = Run { hint: None, open: &[], before: &[], body: ARGUMENTS, after: &[], separator: &[], close: &[] };

/// A JSON list of calls.
const LIST: Run = Run { open: &["["], separator: &[","], close: &["]"], ..RUN };

const fn format(name: &'static str, families: &'static str, run: Run) -> Format {
    Format { name, families, layout: Layout::Run(run), ids: CallIds::Prefixed }
}

const fn tagged(after_name: &'static [&'static str], tags: &'static Tags) -> Body {
    Body::Named { after_name, arguments: Encoding::Tags(tags) }
}

const BY_SCHEMA: Types = Types::BySchema;

static XML_LINES: Tags = Tags {
    before_key: "<parameter=",
    after_key: &[(">", BY_SCHEMA)],
    before_value: "",
    after_value: "</parameter>",
    own_lines: true,
};
static XML: Tags = Tags { own_lines: false, ..XML_LINES };
static NAMED_XML: Tags =
    Tags { before_key: "<parameter name=\"", after_key: &[("\">", BY_SCHEMA)], own_lines: false, ..XML_LINES };
static STEP_XML: Tags = Tags {
    before_key: "<steptml:parameter name=\"",
    after_key: &[("\">", BY_SCHEMA)],
    after_value: "</steptml:parameter>",
    own_lines: false,
    ..XML_LINES
};
static ATEM_XML: Tags = Tags {
    before_key: "<atem:parameter name=\"",
    after_key: &[("\">", BY_SCHEMA)],
    after_value: "</atem:parameter>",
    own_lines: false,
    ..XML_LINES
};
static PARAM_XML: Tags = Tags {
    before_key: "<param name=\"",
    after_key: &[("\">", BY_SCHEMA)],
    after_value: "</param>",
    own_lines: false,
    ..XML_LINES
};
static KEYS_AND_VALUES: Tags = Tags {
    before_key: "<arg_key>",
    after_key: &[("</arg_key>", BY_SCHEMA)],
    before_value: "<arg_value>",
    after_value: "</arg_value>",
    own_lines: false,
};
static DSML: Tags = Tags {
    before_key: "<｜DSML｜parameter name=\"",
    after_key: &[("\" string=\"true\">", Types::Text), ("\" string=\"false\">", Types::NotText)],
    before_value: "",
    after_value: "</｜DSML｜parameter>",
    own_lines: false,
};
static TYPED: Tags = Tags {
    before_key: "<|open|>argument key=\"",
    after_key: &[
        ("\" type=\"string\"<|sep|>", Types::Text),
        ("\" type=\"number\"<|sep|>", Types::Number),
        ("\" type=\"boolean\"<|sep|>", Types::Boolean),
        ("\" type=\"null\"<|sep|>", Types::Null),
        ("\" type=\"object\"<|sep|>", Types::Object),
        ("\" type=\"array\"<|sep|>", Types::Array),
    ],
    before_value: "",
    after_value: "<|close|>argument<|sep|>",
    own_lines: false,
};
static MINIMAX: Elements = Elements { before_tag: "]<]minimax[>[", item: "item" };
static PYTHON: Literals = Literals { after_key: '=', close: ')', quote: None };
static GEMMA: Literals = Literals { after_key: ':', close: '}', quote: Some("<|\"|>") };
static FUNCTION_GEMMA: Literals = Literals { quote: Some("<escape>"), ..GEMMA };

const PYTHON_LIST: Run =
    Run { body: Body::Named { after_name: &["("], arguments: Encoding::Literals(&PYTHON) }, ..LIST };

/// Nothing but a JSON object.
const JSON_BODY: (&[Item], &[Item]) = (&[Item::Object], &[]);

/// What our own instruction asks for.
pub(super) const GENERIC: &str = "json";

impl Format {
    /// The format of this name in the table.
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        FORMATS.iter().find(|format| format.name == name)
    }
}

pub(super) static FORMATS: &[Format] = &[
    format(
        "hermes",
        "Hermes 2 Pro and 3, Qwen 2.5 and 3, Granite 4, Ernie 4.5, SmolLM3",
        Run { before: &["<tool_call>"], after: &["</tool_call>"], ..RUN },
    ),
    format(
        "qwen-xml",
        "Qwen3-Coder, Qwen3.5, Step-3.5, Nemotron 3 Nano",
        Run {
            before: &["<tool_call>", "<function="],
            body: tagged(&[">"], &XML_LINES),
            after: &["</function>", "</tool_call>"],
            ..RUN
        },
    ),
    format(
        "glm",
        "GLM 4.5, 4.6 and 4.7",
        Run { before: &["<tool_call>"], body: tagged(&[], &KEYS_AND_VALUES), after: &["</tool_call>"], ..RUN },
    ),
    format(
        "longcat",
        "LongCat-Flash",
        Run {
            before: &["<longcat_tool_call>"],
            body: tagged(
                &[],
                &Tags {
                    before_key: "<longcat_arg_key>",
                    after_key: &[("</longcat_arg_key>", BY_SCHEMA)],
                    before_value: "<longcat_arg_value>",
                    after_value: "</longcat_arg_value>",
                    own_lines: false,
                },
            ),
            after: &["</longcat_tool_call>"],
            ..RUN
        },
    ),
    Format {
        ids: CallIds::Written,
        ..format(
            "kimi-k2",
            "Kimi K2",
            Run {
                open: &["<|tool_calls_section_begin|>"],
                before: &["<|tool_call_begin|>"],
                body: Body::Id { after_id: &["<|tool_call_argument_begin|>"] },
                after: &["<|tool_call_end|>"],
                close: &["<|tool_calls_section_end|>"],
                ..RUN
            },
        )
    },
    format(
        "kimi-k3",
        "Kimi K3",
        Run {
            open: &["<|open|>tools<|sep|>"],
            before: &["<|open|>call tool=\""],
            body: Body::Indexed {
                before_index: "\" index=\"",
                after_index: &["\"<|sep|>"],
                arguments: Encoding::Tags(&TYPED),
            },
            after: &["<|close|>call<|sep|>"],
            close: &["<|close|>tools<|sep|>"],
            ..RUN
        },
    ),
    format(
        "deepseek-fenced",
        "DeepSeek V3 and R1",
        Run {
            open: &["<｜tool▁calls▁begin｜>"],
            before: &["<｜tool▁call▁begin｜>function<｜tool▁sep｜>"],
            body: Body::Named { after_name: &["```json"], arguments: Encoding::Json },
            after: &["```", "<｜tool▁call▁end｜>"],
            close: &["<｜tool▁calls▁end｜>"],
            ..RUN
        },
    ),
    format(
        "deepseek",
        "DeepSeek V3.1",
        Run {
            open: &["<｜tool▁calls▁begin｜>"],
            before: &["<｜tool▁call▁begin｜>"],
            body: Body::Named { after_name: &["<｜tool▁sep｜>"], arguments: Encoding::Json },
            after: &["<｜tool▁call▁end｜>"],
            close: &["<｜tool▁calls▁end｜>"],
            ..RUN
        },
    ),
    format(
        "dsml",
        "DeepSeek V3.2",
        Run { open: &["<｜DSML｜function_calls>"], close: &["</｜DSML｜function_calls>"], ..DSML_RUN },
    ),
    format(
        "dsml-tools",
        "DeepSeek V4",
        Run { open: &["<｜DSML｜tool_calls>"], close: &["</｜DSML｜tool_calls>"], ..DSML_RUN },
    ),
    format(
        "tool-calls-lines",
        "MiniMax M1 and Text-01",
        Run { open: &["<tool_calls>"], close: &["</tool_calls>"], ..RUN },
    ),
    format(
        "tool-calls-list",
        "Apriel, Hunyuan A13B, Jamba",
        Run { open: &["<tool_calls>", "["], close: &["]", "</tool_calls>"], ..LIST },
    ),
    format(
        "minimax",
        "MiniMax M2",
        Run {
            open: &["<minimax:tool_call>"],
            before: &["<invoke name=\""],
            body: tagged(&["\">"], &NAMED_XML),
            after: &["</invoke>"],
            close: &["</minimax:tool_call>"],
            ..RUN
        },
    ),
    format(
        "minimax-m3",
        "MiniMax M3",
        Run {
            open: &["]<]minimax[>[<tool_call>"],
            before: &["]<]minimax[>[<invoke name=\""],
            body: Body::Named { after_name: &["\">"], arguments: Encoding::Elements(&MINIMAX) },
            after: &["]<]minimax[>[</invoke>"],
            close: &["]<]minimax[>[</tool_call>"],
            ..RUN
        },
    ),
    format(
        "seed",
        "Seed-OSS",
        Run {
            before: &["<seed:tool_call>", "<function="],
            body: tagged(&[">"], &XML),
            after: &["</function>", "</seed:tool_call>"],
            ..RUN
        },
    ),
    format(
        "step",
        "Step-3",
        Run {
            open: &["<｜tool_calls_begin｜>"],
            before: &["<｜tool_call_begin｜>function<｜tool_sep｜>", "<steptml:invoke name=\""],
            body: tagged(&["\">"], &STEP_XML),
            after: &["</steptml:invoke>", "<｜tool_call_end｜>"],
            close: &["<｜tool_calls_end｜>"],
            ..RUN
        },
    ),
    format(
        "hunyuan",
        "Hunyuan 3",
        Run {
            open: &["<tool_calls>"],
            before: &["<tool_call>"],
            body: tagged(&["<tool_sep>"], &KEYS_AND_VALUES),
            after: &["</tool_call>"],
            close: &["</tool_calls>"],
            ..RUN
        },
    ),
    format(
        "hunyuan-opensource",
        "Hy3",
        Run {
            open: &["<tool_calls:opensource>"],
            before: &["<tool_call:opensource>"],
            body: tagged(
                &["<tool_sep:opensource>"],
                &Tags {
                    before_key: "<arg_key:opensource>",
                    after_key: &[("</arg_key:opensource>", BY_SCHEMA)],
                    before_value: "<arg_value:opensource>",
                    after_value: "</arg_value:opensource>",
                    own_lines: false,
                },
            ),
            after: &["</tool_call:opensource>"],
            close: &["</tool_calls:opensource>"],
            ..RUN
        },
    ),
    format(
        "minicpm",
        "MiniCPM 5",
        Run { before: &["<function name=\""], body: tagged(&["\">"], &PARAM_XML), after: &["</function>"], ..RUN },
    ),
    Format {
        name: "harmony",
        families: "gpt-oss",
        ids: CallIds::Prefixed,
        layout: Layout::Channels(Channels {
            start: "<|start|>",
            role: "assistant",
            end_of_header: "<|message|>",
            ends: &["<|end|>", "<|return|>", "<|call|>"],
            addressee: |header| match header.split_once("to=functions.") {
                Some((_, rest)) => Addressee::Function(rest.split(['<', ' ']).next().unwrap_or_default()),
                None if header.contains("<|channel|>analysis") => Addressee::Model,
                None => Addressee::User,
            },
            asides: &["<|channel|>analysis", "<|channel|>commentary"],
            end_of_aside: "<|end|>",
            content: "<|channel|>final",
            call: ("<|channel|>commentary to=functions.", " <|constrain|>json"),
            body: JSON_BODY,
            arguments: Encoding::Json,
            parallel: false,
        }),
    },
    Format {
        name: "functionary",
        families: "Functionary 3.2 and medium 3.0",
        ids: CallIds::Prefixed,
        layout: Layout::Channels(Channels {
            start: ">>>",
            role: "",
            end_of_header: "\n",
            ends: &[],
            addressee: |header| match header.trim() {
                "all" => Addressee::User,
                name => Addressee::Function(name),
            },
            asides: &[],
            end_of_aside: "",
            content: "all",
            call: ("", ""),
            body: JSON_BODY,
            arguments: Encoding::Json,
            parallel: true,
        }),
    },
    Format {
        name: "atem",
        families: "Muse Glimmer",
        ids: CallIds::Prefixed,
        layout: Layout::Channels(Channels {
            start: "<|start|>",
            role: "assistant",
            end_of_header: "<|message|>",
            ends: &["<|eom|>", "<|eot|>"],
            addressee: |header| match header.split_once("to=").map(|(_, rest)| rest.trim()) {
                Some("self") => Addressee::Model,
                Some("user") | None => Addressee::User,
                Some(name) => Addressee::Function(name),
            },
            asides: &[" to=self"],
            end_of_aside: "<|eom|>",
            content: " to=user",
            call: (" to=", ""),
            body: (
                &[
                    Item::Marker("<atem:function_calls>"),
                    Item::Marker("<atem:invoke name=\""),
                    Item::BareName,
                    Item::Marker("\">"),
                ],
                &[Item::Marker("</atem:invoke>"), Item::Marker("</atem:function_calls>")],
            ),
            arguments: Encoding::Tags(&ATEM_XML),
            parallel: true,
        }),
    },
    format(
        "function-tag",
        "Functionary 3.1, Llama 3.1 as prompted",
        Run {
            before: &["<function="],
            body: Body::Named { after_name: &[">"], arguments: Encoding::Json },
            after: &["</function>"],
            ..RUN
        },
    ),
    format("function-call", "Granite 20B function calling", Run { before: &["<function_call>"], ..RUN }),
    format("phi", "Phi-4-mini", Run { open: &["<|tool_call|>", "["], close: &["]", "<|/tool_call|>"], ..LIST }),
    format("functools", "Phi-4-mini as prompted", Run { open: &["functools", "["], close: &["]"], ..LIST }),
    format("granite", "Granite 3.0 to 3.3", Run { open: &["<|tool_call|>", "["], close: &["]"], ..LIST }),
    format(
        "internlm",
        "InternLM 2 and 2.5",
        Run { before: &["<|action_start|>", "<|plugin|>"], after: &["<|action_end|>"], ..RUN },
    ),
    format("gigachat-token", "GigaChat 3.1", Run { before: &["<|function_call|>"], ..RUN }),
    format("gigachat", "GigaChat 3", Run { before: &["function call<|role_sep|>"], ..RUN }),
    Format {
        ids: CallIds::Ten,
        ..format(
            "solar",
            "Solar Open",
            Run {
                open: &["<|tool_calls|>"],
                before: &["<|tool_call:begin|>"],
                body: Body::AfterId { before_name: "<|tool_call:name|>", after_name: &["<|tool_call:args|>"] },
                after: &["<|tool_call:end|>"],
                ..RUN
            },
        )
    },
    format(
        "apertus",
        "Apertus",
        Run { open: &["<|tools_prefix|>", "["], body: Body::Keyed, close: &["]", "<|tools_suffix|>"], ..LIST },
    ),
    format(
        "command",
        "Command R7B and A",
        Run {
            open: &["<|START_ACTION|>", "["],
            body: Body::Object {
                name_key: "\"tool_name\"",
                arguments_key: "\"parameters\"",
                index_key: Some("\"tool_call_id\""),
            },
            close: &["]", "<|END_ACTION|>"],
            ..LIST
        },
    ),
    format(
        "command-r",
        "Command R and R+",
        Run {
            open: &["Action:", "```json", "["],
            body: object("\"tool_name\"", "\"parameters\""),
            close: &["]", "```"],
            ..LIST
        },
    ),
    format(
        "lfm",
        "LFM2 and LFM2.5",
        Run { open: &["<|tool_call_start|>", "["], close: &["]", "<|tool_call_end|>"], ..PYTHON_LIST },
    ),
    format(
        "toolcall",
        "Llama Nemotron, Nemotron Nano 2",
        Run { open: &["<TOOLCALL>", "["], close: &["]", "</TOOLCALL>"], ..LIST },
    ),
    format(
        "gemma",
        "Gemma 4",
        Run {
            before: &["<|tool_call>", "call:"],
            body: Body::Named { after_name: &["{"], arguments: Encoding::Literals(&GEMMA) },
            after: &["<tool_call|>"],
            ..RUN
        },
    ),
    format(
        "function-gemma",
        "FunctionGemma",
        Run {
            before: &["<start_function_call>", "call:"],
            body: Body::Named { after_name: &["{"], arguments: Encoding::Literals(&FUNCTION_GEMMA) },
            after: &["<end_function_call>"],
            ..RUN
        },
    ),
    Format {
        ids: CallIds::Nine,
        ..format(
            "mistral-list",
            "Mistral with tokenizer version 3 or 7",
            Run { open: &["[TOOL_CALLS]", "["], close: &["]"], ..LIST },
        )
    },
    Format {
        ids: CallIds::Nine,
        ..format(
            "mistral",
            "Mistral with tokenizer version 11 or later",
            Run {
                before: &["[TOOL_CALLS]"],
                body: Body::Named { after_name: &["[ARGS]"], arguments: Encoding::Json },
                ..RUN
            },
        )
    },
    Format {
        ids: CallIds::Nine,
        ..format(
            "mistral-id",
            "Mistral Small 3.2",
            Run {
                before: &["[TOOL_CALLS]"],
                body: Body::Identified { before_id: "[CALL_ID]", after_id: &["[ARGS]"] },
                ..RUN
            },
        )
    },
    format(
        "llama",
        "Llama 3.1, 3.2 and 3.3",
        Run { hint: Some("<|python_tag|>"), body: object("\"name\"", "\"parameters\""), separator: &[";"], ..RUN },
    ),
    format("llama4", "Llama 4", Run { body: object("\"name\"", "\"parameters\""), ..RUN }),
    format("python", "Llama 3.2 and 4 (pythonic), ToolACE", PYTHON_LIST),
    format("json-list", "xLAM 2", LIST),
    format(GENERIC, "models whose template shows no tools, as prompted", RUN),
];

const DSML_RUN: Run =
    Run {
        before: &["<｜DSML｜invoke name=\""], body: tagged(&["\">"], &DSML), after: &["</｜DSML｜invoke>"], ..RUN
    };

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
