//! COMPAT: of several faults in a request, the one that TGI checks first is reported.

use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use crate::server::{Answer, Server};

/// A fault in a request. A field with `null` means that the fault is the absence of the field.
struct Fault {
    /// Fields of `parameters`, and `inputs`.
    fields: Value,
    told: &'static str,
}

const FULL: &str = "Model is overloaded";

fn faults() -> Vec<Fault> {
    let fault = |fields, told| Fault { fields, told };
    vec![
        fault(json!({"best_of": 2, "stream": true}), "`best_of` != 1 is not supported when streaming"),
        fault(
            json!({"decoder_input_details": true, "stream": true, "best_of": null}),
            "`decoder_input_details` == true is not",
        ),
        fault(json!({"best_of": 3}), "`best_of` must be > 0"),
        fault(json!({"full": true}), FULL),
        fault(
            json!({"best_of": 2, "do_sample": false, "temperature": null, "top_k": null}),
            "you must use sampling when `best_of` is > 1",
        ),
        fault(json!({"temperature": 0}), "`temperature` must be"),
        fault(json!({"repetition_penalty": 0}), "`repetition_penalty` must be"),
        fault(json!({"frequency_penalty": 3}), "`frequency_penalty` must be"),
        fault(json!({"top_p": 1}), "`top_p` must be"),
        fault(json!({"typical_p": 1}), "`typical_p` must be"),
        fault(json!({"top_k": 0}), "`top_k` must be"),
        fault(json!({"max_new_tokens": 0}), "`max_new_tokens` must be"),
        fault(json!({"stop": ["", "", "", "", ""]}), "`stop` supports up to 4"),
        fault(json!({"best_of": 2, "do_sample": true, "seed": 1}), "`seed` must not be set when `best_of` > 1"),
        fault(json!({"top_n_tokens": 6}), "`top_n_tokens` must be"),
        fault(json!({"inputs": ""}), "`inputs` cannot be empty"),
        fault(json!({"truncate": 0}), "`truncate` must be"),
        fault(json!({"max_new_tokens": 256}), "`inputs` tokens + `max_new_tokens` must be <= 256"),
        fault(json!({"inputs": "x".repeat(201)}), "`inputs` must have at most 200 tokens"),
        fault(json!({"grammar": {"type": "regex", "value": "broken"}}), "`grammar` is not a grammar"),
    ]
}

/// `None` if a request cannot have both faults.
fn merged(one: &Value, other: &Value) -> Option<Map<String, Value>> {
    let mut fields = one.as_object().unwrap().clone();
    for (name, value) in other.as_object().unwrap() {
        if fields.insert(name.clone(), value.clone()).is_some_and(|before| before != *value) {
            return None;
        }
    }
    Some(fields)
}

async fn ask(free: &Server, full: &Server, mut fields: Map<String, Value>) -> Answer {
    let server = if fields.remove("full").is_some() { full } else { free };
    let path = if fields.remove("stream").is_some() { "/generate_stream" } else { "/generate" };
    let inputs = fields.remove("inputs").unwrap_or_else(|| "Hi".into());
    server.post(path, json!({"inputs": inputs, "parameters": fields})).await
}

#[tokio::test]
async fn the_first_fault_in_tgi_s_order_is_reported() {
    let (free, _free_sequences) = Server::manual().await;
    let (full, _full_sequences) = Server::manual().await;
    let mut open = Vec::new();
    for _ in 0..4 {
        open.push(full.open("/generate_stream", json!({"inputs": "Hi"})).await);
    }
    let faults = faults();
    let mut num_pairs = 0;
    for (index, first) in faults.iter().enumerate() {
        for later in &faults[index..] {
            let Some(fields) = merged(&first.fields, &later.fields) else { continue };
            let answer = ask(&free, &full, fields.clone()).await;
            let is_full = first.told == FULL;
            let status = if is_full { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::UNPROCESSABLE_ENTITY };
            assert_eq!(answer.status, status, "{fields:?}: {}", answer.body);
            let body = answer.json();
            assert_eq!(body["error_type"], if is_full { "overloaded" } else { "validation" });
            assert!(body["error"].as_str().unwrap().contains(first.told), "{fields:?}: {body}");
            num_pairs += 1;
        }
    }
    assert!(num_pairs > 150, "{num_pairs}");
    // The only pair that cannot occur together.
    let both = json!({"best_of": 2, "decoder_input_details": true, "stream": true});
    let answer = ask(&free, &full, both.as_object().unwrap().clone()).await;
    assert!(answer.body.contains(faults[0].told), "{}", answer.body);
    assert!(free.engine.requests.lock().unwrap().is_empty());
}
