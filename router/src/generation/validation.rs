//! What can be wrong with a request's parameters. Messages name the parameter, its limit and what was given.

use crate::sequence::Task;

// COMPAT: TGI's messages, where TGI has the check.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum ValidationError {
    #[error("`best_of` must be > 0 and <= {max}. Given: {given}")]
    BestOf { max: usize, given: usize },
    #[error("`best_of` != 1 is not supported when streaming tokens")]
    BestOfStream,
    #[error("you must use sampling when `best_of` is > 1")]
    BestOfSampling,
    #[error("`seed` must not be set when `best_of` > 1")]
    BestOfSeed,
    #[error("`n` > 1 is not supported when streaming tokens")]
    GenerationsStream,
    #[error("`decoder_input_details` == true is not supported when streaming tokens")]
    PrefillDetailsStream,
    #[error("`temperature` must be strictly positive")]
    Temperature,
    /// A number that 32 bits cannot hold.
    #[error("`{field}` must be at most {max:e}, the largest number of 32 bits", max = f32::MAX)]
    TooLarge { field: &'static str },
    #[error("`repetition_penalty` must be strictly positive")]
    RepetitionPenalty,
    #[error("`frequency_penalty` must be >= -2.0 and <= 2.0")]
    FrequencyPenalty,
    #[error("`presence_penalty` must be >= -2.0 and <= 2.0")]
    PresencePenalty,
    #[error("`top_p` must be > 0.0 and < 1.0")]
    TopP,
    #[error("`typical_p` must be > 0.0 and < 1.0")]
    TypicalP,
    #[error("`top_k` must be strictly positive")]
    TopK,
    #[error("`max_new_tokens` must be strictly positive")]
    NoNewTokens,
    #[error("`stop` supports up to {max} stop sequences. Given: {given}")]
    StopCount { max: usize, given: usize },
    #[error("`stop` must not contain an empty string")]
    EmptyStop,
    #[error("`top_n_tokens` must be >= 0 and <= {max}. Given: {given}")]
    TopNTokens { max: u32, given: u32 },
    #[error("`inputs` cannot be empty")]
    EmptyInput,
    #[error("`prompt` cannot be empty")]
    NoPrompts,
    #[error("`messages` cannot be empty")]
    NoMessages,
    #[error("`instances` cannot be empty")]
    NoInstances,
    #[error("`truncate` must be strictly positive and less than or equal to {max}. Given: {given}")]
    Truncate { max: usize, given: usize },
    #[error("{0}")]
    Tokenizer(String),
    #[error("this route is not what the model is for: it {served}")]
    Task { served: Task },
    #[error(
        "`inputs` must be at most {max}; raise --max-client-batch-size or --max-concurrent-requests. Given: {given}"
    )]
    NumInputs { max: usize, given: usize },
    #[error("{0}")]
    Prompt(String),
    #[error("`dimensions` must be {allowed}. Given: {given}")]
    Dimensions { allowed: String, given: usize },
    #[error(
        "the text has the token `{token}` with id {given}, but the model has embeddings only for ids < {vocabulary}; \
         leave it out, or serve a model whose embedding was resized to its tokenizer"
    )]
    TokenOfText { token: String, vocabulary: u32, given: u32 },
    #[error("token ids must be < {vocabulary}. Given: {given}")]
    TokenId { field: &'static str, vocabulary: u32, given: u32 },
    #[error(
        "`inputs` tokens + `max_new_tokens` must be <= {max}. Given: {input} `inputs` tokens and {new} `max_new_tokens`"
    )]
    TotalTokens { max: usize, input: usize, new: u32 },
    #[error("`max_new_tokens` must be <= {max}. Given: {given}")]
    NewTokens { max: u32, given: u32 },
    #[error("`inputs` must have at most {max} tokens. Given: {given}")]
    InputTokens { max: usize, given: usize },
    /// What was given, and what is served.
    #[error("`adapter_id` {0}")]
    Adapter(String),
    #[error("`grammar` is not a grammar: {0}")]
    Grammar(String),
    #[error("`grammar` and `response_format` are the same thing; send one of them")]
    TwoGrammars,
    #[error("`{one}` and `{other}` exclude each other; send one of them")]
    Exclusive { one: &'static str, other: &'static str },
    #[error("`grammar` is not supported: the server runs with --disable-grammar-support")]
    GrammarDisabled,
    #[error("`min_p` must be >= 0.0 and <= 1.0")]
    MinP,
    #[error("`n` must be >= 1 and <= {max}. Given: {given}")]
    Generations { max: usize, given: usize },
    #[error("`best_of` must be >= `n`. Given: {best_of} and {n}")]
    BestOfBelowN { best_of: usize, n: usize },
    #[error("`min_tokens` must be <= `max_tokens`. Given: {min} and {max}")]
    MinTokens { min: u32, max: u32 },
    #[error("`stop_token_ids` supports up to {max} tokens. Given: {given}")]
    StopTokenCount { max: usize, given: usize },
    #[error("`logit_bias` supports up to {max} tokens. Given: {given}")]
    LogitBiasCount { max: usize, given: usize },
    #[error("`logit_bias` must be >= -100 and <= 100. Given: {bias} for token {token_id}")]
    LogitBias { token_id: u32, bias: f32 },
    #[error("`allowed_token_ids` must name at least one token")]
    NoAllowedTokens,
    #[error("`allowed_token_ids` supports up to {max} tokens, as many as the vocabulary has. Given: {given}")]
    AllowedTokenCount { max: u32, given: usize },
    #[error("`bad_words` supports up to {max} {unit}. Given: {given}")]
    BadWords { unit: &'static str, max: usize, given: usize },
    #[error("`bad_words` must not contain an empty string")]
    EmptyBadWord,
    #[error("`priority` must be >= -{max} and <= {max}. Given: {given}")]
    Priority { max: i32, given: i32 },
    #[error("`timeout` must be > 0 and <= {max} seconds. Given: {given}")]
    Timeout { max: f64, given: f64 },
    #[error("`ignore_eos` cannot be combined with a grammar, whose end is the end of the answer")]
    IgnoreEosWithGrammar,
    #[error("`stream_options` is only allowed with `stream`")]
    StreamOptions,
    #[error("`max_tokens` and `max_completion_tokens` are the same thing; send one of them")]
    TwoLengths,
    #[error("`{field}` must be >= 0 and <= {max}. Given: {given}")]
    Logprobs { field: &'static str, max: u32, given: u32 },
    #[error("`{field}` is not supported: {why}")]
    Unsupported { field: &'static str, why: &'static str },
    #[error("`{part}` parts are not supported in a message's content by this model")]
    ContentPart { part: String },
    #[error("the prompt has {num_places} places for images, but {num_images} images were given")]
    ImagePlaces { num_places: usize, num_images: usize },
    /// What is wrong with an image, which is named by its number.
    #[error("{0}")]
    Image(String),
    #[error("`truncate` cannot be combined with images")]
    TruncateImages,
    /// A message, a part of its content or a tool cannot be used. `path`: where it is in the request.
    #[error("{path}: {problem}")]
    Item { path: String, problem: String },
    /// The request has fields that the server does not know, and the server is strict. `path`: of the first. `message`: names all.
    #[error("{message}")]
    UnknownField { path: Box<str>, message: Box<str> },
}

/// What a dialect calls the fields that dialects name differently.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FieldNames {
    pub(crate) prompt: &'static str,
    pub(crate) max_tokens: &'static str,
    pub(crate) stop: &'static str,
    pub(crate) grammar: &'static str,
}

impl ValidationError {
    /// The message with the names and ranges of OpenAI's API.
    pub(crate) fn openai_message(&self, names: FieldNames) -> String {
        let quoted = |name: &str| format!("`{name}`");
        match self {
            Self::Temperature => "`temperature` must be >= 0.0".to_owned(),
            Self::TopP => "`top_p` must be >= 0.0 and <= 1.0".to_owned(),
            Self::TypicalP => "`typical_p` must be > 0.0 and <= 1.0".to_owned(),
            Self::TopK => "`top_k` must be >= -1".to_owned(),
            Self::Item { .. } | Self::UnknownField { .. } => self.to_string(),
            error => error
                .to_string()
                .replace("`inputs`", &quoted(names.prompt))
                .replace("`max_new_tokens`", &quoted(names.max_tokens))
                .replace("`stop`", &quoted(names.stop))
                .replace("`grammar`", &quoted(names.grammar))
                .replace("`truncate`", "`truncate_prompt_tokens`")
                .replace("`top_n_tokens`", "`top_logprobs`"),
        }
    }

    /// Whether the prompt, with the tokens to generate, is longer than the context.
    pub(crate) fn exceeds_context(&self) -> bool {
        matches!(self, Self::TotalTokens { .. } | Self::InputTokens { .. })
    }

    /// The invalid field of OpenAI's API, if a single field is invalid.
    pub(crate) fn openai_param(&self, names: FieldNames) -> Option<&str> {
        match self {
            Self::EmptyInput
            | Self::NumInputs { .. }
            | Self::TokenOfText { .. }
            | Self::InputTokens { .. }
            | Self::TotalTokens { .. } => Some(names.prompt),
            Self::TruncateImages => Some("truncate_prompt_tokens"),
            Self::BestOf { .. } | Self::BestOfStream | Self::BestOfSampling => Some("best_of"),
            Self::BestOfSeed => Some("seed"),
            Self::Temperature => Some("temperature"),
            Self::TooLarge { field } => Some(field),
            Self::RepetitionPenalty => Some("repetition_penalty"),
            Self::FrequencyPenalty => Some("frequency_penalty"),
            Self::PresencePenalty => Some("presence_penalty"),
            Self::TopP => Some("top_p"),
            Self::TypicalP => Some("typical_p"),
            Self::TopK => Some("top_k"),
            Self::NoNewTokens | Self::NewTokens { .. } | Self::TwoLengths => Some(names.max_tokens),
            Self::StopCount { .. } | Self::EmptyStop => Some(names.stop),
            Self::TopNTokens { .. } => Some("top_logprobs"),
            Self::Logprobs { field, .. } | Self::Unsupported { field, .. } | Self::TokenId { field, .. } => Some(field),
            Self::Exclusive { other, .. } => Some(other),
            Self::Adapter(_) => Some("model"),
            Self::Grammar(_) | Self::TwoGrammars | Self::GrammarDisabled => Some(names.grammar),
            Self::MinP => Some("min_p"),
            Self::Generations { .. } | Self::GenerationsStream => Some("n"),
            Self::BestOfBelowN { .. } => Some("best_of"),
            Self::MinTokens { .. } => Some("min_tokens"),
            Self::StopTokenCount { .. } => Some("stop_token_ids"),
            Self::LogitBiasCount { .. } | Self::LogitBias { .. } => Some("logit_bias"),
            Self::NoAllowedTokens | Self::AllowedTokenCount { .. } => Some("allowed_token_ids"),
            Self::BadWords { .. } | Self::EmptyBadWord => Some("bad_words"),
            Self::Priority { .. } => Some("priority"),
            Self::Timeout { .. } => Some("timeout"),
            Self::IgnoreEosWithGrammar => Some("ignore_eos"),
            Self::StreamOptions => Some("stream_options"),
            Self::NoMessages | Self::ContentPart { .. } | Self::ImagePlaces { .. } | Self::Image(_) => Some("messages"),
            Self::Item { path, .. } => Some(path),
            Self::UnknownField { path, .. } => Some(path),
            Self::NoPrompts => Some("prompt"),
            Self::Dimensions { .. } => Some("dimensions"),
            Self::Prompt(_) => Some("prompt_name"),
            Self::Task { .. } => Some("model"),
            Self::Truncate { .. } => Some("truncate_prompt_tokens"),
            Self::PrefillDetailsStream | Self::NoInstances | Self::Tokenizer(_) => None,
        }
    }
}
