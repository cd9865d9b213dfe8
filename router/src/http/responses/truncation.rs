//! `truncation: "auto"`: drops the oldest turns of a conversation that is too long.

use serde_json::Value;

use crate::generation::{Chat, GenerationError, GenerationRequest, Prompt};
use crate::http::service::Service;
use crate::text::ChatInputs;

/// Drops as few of the oldest turns as the context requires. What is still too long is refused later.
pub(super) async fn fit(service: &Service, request: &mut GenerationRequest) -> Result<(), GenerationError> {
    let limits = &service.config().limits;
    let num_new = request.parameters.max_new_tokens.unwrap_or(1) as usize;
    let max_tokens = limits.max_input_tokens.min(limits.max_total_tokens.saturating_sub(num_new));
    for prompt in &mut request.prompts {
        let Prompt::Chat(chat) = prompt else { continue };
        let turns = turns(&chat.inputs.messages);
        // INVARIANT: the conversation from turn `low` on is too long; the one from turn `high` on fits, or is the last turn.
        let (mut low, mut high) = (0, turns.len().saturating_sub(1));
        if high == 0 || fits(service, without(chat, &turns, 0), max_tokens).await? {
            continue;
        }
        while high - low > 1 {
            let middle = usize::midpoint(low, high);
            if fits(service, without(chat, &turns, middle), max_tokens).await? { high = middle } else { low = middle }
        }
        **chat = without(chat, &turns, high);
    }
    Ok(())
}

/// Positions of the messages with which the user's turns start.
fn turns(messages: &[Value]) -> Vec<usize> {
    messages.iter().enumerate().filter(|(_, message)| message["role"] == "user").map(|(position, _)| position).collect()
}

/// The conversation from this turn on, with its instructions.
fn without(chat: &Chat, turns: &[usize], turn: usize) -> Chat {
    let messages = &chat.inputs.messages;
    let start = if turn == 0 { 0 } else { turns[turn] };
    let (dropped, kept) = messages.split_at(start);
    let system = dropped.iter().filter(|message| message["role"] == "system");
    let num_images: usize =
        dropped.iter().filter_map(|message| message["content"].as_array()).map(|parts| num_images(parts)).sum();
    let messages = system.chain(kept).cloned().collect();
    Chat {
        inputs: ChatInputs { messages, ..chat.inputs.clone() },
        images: chat.images[num_images..].to_vec(),
        ..chat.clone()
    }
}

fn num_images(parts: &[Value]) -> usize {
    parts.iter().filter(|part| part["type"] == "image").count()
}

async fn fits(service: &Service, chat: Chat, max_tokens: usize) -> Result<bool, GenerationError> {
    match service.generation().tokenize_chat(chat, false).await {
        Ok(tokenized) => Ok(tokenized.spans.len() <= max_tokens),
        Err(GenerationError::Validation(error)) if error.exceeds_context() => Ok(false),
        Err(error) => Err(error),
    }
}
