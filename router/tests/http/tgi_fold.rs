//! Property: the sum of a stream is the plain answer, for any model output and finish reason.

use std::sync::{Arc, Mutex};

use penstock_router::sequence::{FinishReason, SequenceEvent, Token, TopToken};
use serde_json::{Value, json};

use crate::model::IM_END;
use crate::server::{Sequence, Server};

const NUM_CASES: u64 = 150;
const STOPS: [&str; 8] = ["END", "\n\nUser", "o w", "\u{e9}", "<|im_start|>", "ld", ": hi and", "!"];

/// A reproducible random generator.
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn token_id(&mut self) -> u32 {
        let id = match self.below(10) {
            // Bytes of two- and three-byte characters, mostly in the wrong order.
            0..4 => [0xC3, 0xA9, 0xE2, 0x82, 0xAC][usize::try_from(self.below(5)).unwrap()],
            4..9 => 258 + self.below(6),
            _ => 256 + self.below(2),
        };
        u32::try_from(id).unwrap()
    }

    fn token(&mut self, num_top: u64) -> Token {
        let logprob = -(f32::from(u16::try_from(self.below(1000)).unwrap())) / 100.0;
        let top = (0..num_top).map(|rank| TopToken { id: self.token_id(), logprob: -(rank as f32) }).collect();
        Token { id: self.token_id(), logprob, top }
    }
}

/// Like the real engine, sends nothing after a stop token or the last allowed token.
fn say(sequence: &Sequence, tokens: &[Token]) {
    sequence.send(SequenceEvent::Started { num_cached_tokens: 0 });
    for (index, token) in tokens.iter().enumerate() {
        sequence.send(SequenceEvent::Token(token.clone()));
        if index + 1 == sequence.request.max_new_tokens as usize {
            return sequence.send(SequenceEvent::Finished(FinishReason::Length));
        }
        if sequence.request.sampling.stop_token_ids.contains(&token.id) {
            return sequence.send(SequenceEvent::Finished(FinishReason::StopToken));
        }
    }
}

fn parameters(dice: &mut Dice, num_top: u64) -> Value {
    let stops: Vec<_> = (0..dice.below(4)).map(|_| STOPS[usize::try_from(dice.below(8)).unwrap()]).collect();
    json!({
        "details": true, "seed": 7, "do_sample": dice.below(2) == 0, "return_full_text": dice.below(2) == 0,
        "max_new_tokens": if dice.below(2) == 0 { json!(1 + dice.below(12)) } else { Value::Null },
        "stop": stops, "top_n_tokens": num_top,
    })
}

#[tokio::test]
async fn a_stream_folds_to_the_plain_answer() {
    let said = Arc::new(Mutex::new(Vec::new()));
    let script = Arc::clone(&said);
    let server = Server::scripted(move |sequence| say(&sequence, &script.lock().unwrap())).await;
    let mut endings = std::collections::HashSet::new();
    for case in 0..NUM_CASES {
        let mut dice = Dice(case);
        let num_top = dice.below(3);
        let mut tokens: Vec<_> = (0..dice.below(16)).map(|_| dice.token(num_top)).collect();
        tokens.push(Token { id: IM_END, ..dice.token(num_top) });
        *said.lock().unwrap() = tokens;
        let body = json!({"inputs": "Hi", "parameters": parameters(&mut dice, num_top)});
        let plain = server.post("/generate", body.clone()).await.json();
        let stream = server.post("/generate_stream", body.clone()).await;
        let events: Vec<Value> = stream.events().iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        check_fold(&plain, &events, &body);
        endings.insert(plain["details"]["finish_reason"].as_str().unwrap().to_owned());
    }
    assert_eq!(endings.len(), 3, "{endings:?}");
}

fn check_fold(plain: &Value, events: &[Value], body: &Value) {
    let (details, last) = (&plain["details"], events.last().unwrap());
    for (index, event) in events.iter().enumerate() {
        assert_eq!(event["index"], index + 1, "{body}");
        assert_eq!(event["generated_text"].is_null(), index + 1 < events.len(), "{body}");
    }
    let column = |name: &str| -> Vec<Value> { events.iter().filter_map(|event| event.get(name).cloned()).collect() };
    assert_eq!(details["tokens"], json!(column("token")), "{body}");
    assert_eq!(details.get("top_tokens").cloned().unwrap_or_else(|| json!([])), json!(column("top_tokens")), "{body}");
    assert_eq!(plain["generated_text"], last["generated_text"], "{body}");
    for name in ["finish_reason", "generated_tokens", "seed"] {
        assert_eq!(details[name], last["details"][name], "{name} {body}");
    }
    assert_eq!(last["details"]["input_length"], 2);
    assert_eq!(details["generated_tokens"], events.len());

    let shown = events.iter().map(|event| &event["token"]).filter(|token| token["special"] == false);
    let shown: String = shown.map(|token| token["text"].as_str().unwrap()).collect();
    let prompt = if body["parameters"]["return_full_text"] == true { "Hi" } else { "" };
    let rest = plain["generated_text"].as_str().unwrap().strip_prefix(&(prompt.to_owned() + &shown)).unwrap();
    // A character cut off by the end is in the text, but in no token's text.
    assert!(rest.chars().all(|character| character == char::REPLACEMENT_CHARACTER), "{rest:?} {body}");
}
