//! `/v1/responses`: answers, streams and their ends.

use axum::http::StatusCode;
use penstock_router::Config;
use penstock_router::config::ApiKeys;
use penstock_router::sequence::{FinishReason, Grammar, SequenceEvent, SequenceFailure};
use serde_json::{Value, json};

use crate::fold::{response_fold, with};
use crate::model::{IM_END, bytes, word};
use crate::server::{Answer, Server, whole};
use crate::tool::{call, prompt, server, server_with_config};

const PATH: &str = "/v1/responses";

pub fn hello(fields: Value) -> Value {
    with(json!({"model": "tgi", "input": "Hi"}), fields)
}

pub fn tool(name: &str) -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({"type": "function", "name": name, "description": "d", "parameters": schema, "strict": false})
}

/// Replaces what differs in each response.
pub fn stable(text: &str) -> String {
    let ids = regex::Regex::new("(resp|msg|rs|fc|ctc|call)_[0-9a-f]{24,32}").unwrap();
    let times = regex::Regex::new("_at\":[1-9][0-9]+").unwrap();
    times.replace_all(&ids.replace_all(text, "${1}_ID"), "_at\":SECONDS").into_owned()
}

/// The events of a stream without the responses in them, one in each line.
fn lines(answer: &Answer) -> String {
    let line = |event: &Value| {
        let mut event = event.clone();
        if let Some(response) = event.get_mut("response") {
            *response = response["status"].take();
        }
        event.to_string()
    };
    stable(&answer.typed_events().iter().map(line).collect::<Vec<_>>().join("\n"))
}

#[tokio::test]
async fn a_response_has_the_specified_shape() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let answer = server.post(PATH, hello(json!({"instructions": "Help.", "metadata": {"a": "b"}}))).await;
    insta::assert_snapshot!(stable(&answer.body), @r#"{"id":"resp_ID","object":"response","created_at":SECONDS,"completed_at":SECONDS,"status":"completed","error":null,"incomplete_details":null,"model":"test/model","output":[{"type":"message","id":"msg_ID","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hello","annotations":[],"logprobs":[]}]}],"usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},"output_tokens":2,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":38},"previous_response_id":null,"instructions":"Help.","tools":[],"tool_choice":"auto","truncation":"disabled","parallel_tool_calls":true,"text":{"format":{"type":"text"}},"temperature":1.0,"top_p":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,"top_logprobs":0,"reasoning":{"effort":null,"summary":null},"max_output_tokens":null,"max_tool_calls":null,"store":false,"background":false,"service_tier":"default","metadata":{"a":"b"},"safety_identifier":null,"prompt_cache_key":null}"#);
}

#[tokio::test]
async fn a_stream_has_the_specified_events_in_order() {
    let server = Server::answering(&[word("Hello"), word(" world"), IM_END]).await;
    let answer = server.post(PATH, hello(json!({"stream": true, "model": "mine"}))).await;
    insta::assert_snapshot!(lines(&answer), @r#"
    {"type":"response.created","response":"in_progress","sequence_number":0}
    {"type":"response.in_progress","response":"in_progress","sequence_number":1}
    {"type":"response.output_item.added","output_index":0,"item":{"type":"message","id":"msg_ID","status":"in_progress","role":"assistant","content":[]},"sequence_number":2}
    {"type":"response.content_part.added","item_id":"msg_ID","output_index":0,"content_index":0,"part":{"type":"output_text","text":"","annotations":[],"logprobs":[]},"sequence_number":3}
    {"type":"response.output_text.delta","item_id":"msg_ID","output_index":0,"content_index":0,"delta":"Hello","logprobs":[],"sequence_number":4}
    {"type":"response.output_text.delta","item_id":"msg_ID","output_index":0,"content_index":0,"delta":" world","logprobs":[],"sequence_number":5}
    {"type":"response.output_text.done","item_id":"msg_ID","output_index":0,"content_index":0,"text":"Hello world","logprobs":[],"sequence_number":6}
    {"type":"response.content_part.done","item_id":"msg_ID","output_index":0,"content_index":0,"part":{"type":"output_text","text":"Hello world","annotations":[],"logprobs":[]},"sequence_number":7}
    {"type":"response.output_item.done","output_index":0,"item":{"type":"message","id":"msg_ID","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hello world","annotations":[],"logprobs":[]}]},"sequence_number":8}
    {"type":"response.completed","response":"completed","sequence_number":9}
    "#);
}

#[tokio::test]
async fn reasoning_text_and_calls_are_items_one_after_the_other() {
    let calls = [call(r#"{"name": "f", "arguments": {"city": "né"}}"#), call(r#"{"name": "g", "arguments": {}}"#)];
    let tokens = [bytes("<think>hm</think>"), vec![word("Hello")], calls.concat(), vec![IM_END]].concat();
    let server = server(move |sequence| sequence.answer(&tokens)).await;
    let body = hello(json!({"tools": [tool("f"), tool("g")]}));
    let plain = server.post(PATH, body.clone()).await;
    insta::assert_snapshot!(stable(&plain.json()["output"].to_string()), @r#"[{"type":"reasoning","id":"rs_ID","status":"completed","summary":[],"content":[{"type":"reasoning_text","text":"hm"}]},{"type":"message","id":"msg_ID","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hello","annotations":[],"logprobs":[]}]},{"type":"function_call","id":"fc_ID","status":"completed","call_id":"call_ID","name":"f","arguments":"{\"city\": \"né\"}"},{"type":"function_call","id":"fc_ID","status":"completed","call_id":"call_ID","name":"g","arguments":"{}"}]"#);
    assert_eq!(plain.json()["usage"]["output_tokens_details"]["reasoning_tokens"], 9);
    let streamed = server.post(PATH, with(body, json!({"stream": true}))).await;
    insta::assert_snapshot!(lines(&streamed), @r#"
    {"type":"response.created","response":"in_progress","sequence_number":0}
    {"type":"response.in_progress","response":"in_progress","sequence_number":1}
    {"type":"response.output_item.added","output_index":0,"item":{"type":"reasoning","id":"rs_ID","status":"in_progress","summary":[],"content":[]},"sequence_number":2}
    {"type":"response.content_part.added","item_id":"rs_ID","output_index":0,"content_index":0,"part":{"type":"reasoning_text","text":""},"sequence_number":3}
    {"type":"response.reasoning_text.delta","item_id":"rs_ID","output_index":0,"content_index":0,"delta":"h","sequence_number":4}
    {"type":"response.reasoning_text.delta","item_id":"rs_ID","output_index":0,"content_index":0,"delta":"m","sequence_number":5}
    {"type":"response.reasoning_text.done","item_id":"rs_ID","output_index":0,"content_index":0,"text":"hm","sequence_number":6}
    {"type":"response.content_part.done","item_id":"rs_ID","output_index":0,"content_index":0,"part":{"type":"reasoning_text","text":"hm"},"sequence_number":7}
    {"type":"response.output_item.done","output_index":0,"item":{"type":"reasoning","id":"rs_ID","status":"completed","summary":[],"content":[{"type":"reasoning_text","text":"hm"}]},"sequence_number":8}
    {"type":"response.output_item.added","output_index":1,"item":{"type":"message","id":"msg_ID","status":"in_progress","role":"assistant","content":[]},"sequence_number":9}
    {"type":"response.content_part.added","item_id":"msg_ID","output_index":1,"content_index":0,"part":{"type":"output_text","text":"","annotations":[],"logprobs":[]},"sequence_number":10}
    {"type":"response.output_text.delta","item_id":"msg_ID","output_index":1,"content_index":0,"delta":"Hello","logprobs":[],"sequence_number":11}
    {"type":"response.output_text.done","item_id":"msg_ID","output_index":1,"content_index":0,"text":"Hello","logprobs":[],"sequence_number":12}
    {"type":"response.content_part.done","item_id":"msg_ID","output_index":1,"content_index":0,"part":{"type":"output_text","text":"Hello","annotations":[],"logprobs":[]},"sequence_number":13}
    {"type":"response.output_item.done","output_index":1,"item":{"type":"message","id":"msg_ID","status":"completed","role":"assistant","content":[{"type":"output_text","text":"Hello","annotations":[],"logprobs":[]}]},"sequence_number":14}
    {"type":"response.output_item.added","output_index":2,"item":{"type":"function_call","id":"fc_ID","status":"in_progress","call_id":"call_ID","name":"f","arguments":""},"sequence_number":15}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":"{","sequence_number":16}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":"\"","sequence_number":17}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":"c","sequence_number":18}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":"i","sequence_number":19}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":"t","sequence_number":20}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":"y","sequence_number":21}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":"\"","sequence_number":22}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":":","sequence_number":23}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":" ","sequence_number":24}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":"\"","sequence_number":25}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":"n","sequence_number":26}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":"é","sequence_number":27}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":"\"","sequence_number":28}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":2,"delta":"}","sequence_number":29}
    {"type":"response.function_call_arguments.done","item_id":"fc_ID","output_index":2,"name":"f","arguments":"{\"city\": \"né\"}","sequence_number":30}
    {"type":"response.output_item.done","output_index":2,"item":{"type":"function_call","id":"fc_ID","status":"completed","call_id":"call_ID","name":"f","arguments":"{\"city\": \"né\"}"},"sequence_number":31}
    {"type":"response.output_item.added","output_index":3,"item":{"type":"function_call","id":"fc_ID","status":"in_progress","call_id":"call_ID","name":"g","arguments":""},"sequence_number":32}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":3,"delta":"{","sequence_number":33}
    {"type":"response.function_call_arguments.delta","item_id":"fc_ID","output_index":3,"delta":"}","sequence_number":34}
    {"type":"response.function_call_arguments.done","item_id":"fc_ID","output_index":3,"name":"g","arguments":"{}","sequence_number":35}
    {"type":"response.output_item.done","output_index":3,"item":{"type":"function_call","id":"fc_ID","status":"completed","call_id":"call_ID","name":"g","arguments":"{}"},"sequence_number":36}
    {"type":"response.completed","response":"completed","sequence_number":37}
    "#);
    assert_eq!(stable(&response_fold(&streamed).to_string()), stable(&plain.json().to_string()));
}

#[tokio::test]
async fn an_answer_that_is_cut_is_incomplete() {
    let tokens = call(r#"{"name": "f", "arguments": {"city": "x"}}"#);
    let server = server(move |sequence| sequence.answer(&tokens)).await;
    let body = hello(json!({"tools": [tool("f")], "max_output_tokens": 32}));
    let answer = server.post(PATH, body.clone()).await.json();
    assert_eq!(
        (&answer["status"], &answer["incomplete_details"]),
        (&json!("incomplete"), &json!({"reason": "max_output_tokens"}))
    );
    let item = &answer["output"][0];
    assert_eq!((&item["status"], &item["arguments"]), (&json!("incomplete"), &json!("{\"ci")));
    let streamed = server.post(PATH, with(body, json!({"stream": true}))).await;
    assert_eq!(streamed.typed_events().last().unwrap()["type"], "response.incomplete");
    assert_eq!(stable(&response_fold(&streamed).to_string()), stable(&answer.to_string()));
}

#[tokio::test]
async fn usage_counts_what_the_prefix_cache_had() {
    let (server, mut sequences) = Server::manual().await;
    let ask = server.post(PATH, hello(json!({})));
    let reply = async {
        let sequence = sequences.recv().await.unwrap();
        sequence.send(SequenceEvent::Started { num_cached_tokens: 16 });
        sequence.send_token(IM_END);
        sequence.send(SequenceEvent::Finished(FinishReason::StopToken));
    };
    let (answer, ()) = tokio::join!(ask, reply);
    let usage = &answer.json()["usage"];
    assert_eq!((&usage["input_tokens"], &usage["input_tokens_details"]["cached_tokens"]), (&json!(21), &json!(16)));
}

#[tokio::test]
async fn a_stream_that_breaks_ends_with_a_failed_response() {
    let (server, mut sequences) = Server::manual().await;
    let response = server.open(PATH, hello(json!({"stream": true}))).await;
    let sequence = sequences.recv().await.unwrap();
    sequence.send_token(word("Hello"));
    sequence.send(SequenceEvent::Failed(SequenceFailure::Sequence("logits are NaN".to_owned())));
    let events = whole(response).await.typed_events();
    let numbers: Vec<_> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let last = events.last().unwrap();
    let error = json!({"code": "server_error", "message": "Request failed during generation: logits are NaN"});
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(last["response"]["error"], error);

    // Also where nothing was generated yet.
    let response = server.open(PATH, hello(json!({"stream": true}))).await;
    drop(sequences.recv().await.unwrap());
    let kinds: Vec<_> = whole(response).await.typed_events().iter().map(|event| event["type"].clone()).collect();
    assert_eq!(kinds, ["response.created", "response.in_progress", "response.failed"]);
}

#[tokio::test]
async fn the_text_follows_its_format() {
    let server = server(|sequence| sequence.answer(&[IM_END])).await;
    let schema = json!({"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": true});
    let answer = server.post(PATH, hello(json!({"text": {"format": schema, "verbosity": "low"}}))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let Some(Grammar::Lark(grammar)) = server.last_request().grammar else { panic!("no grammar") };
    assert!(grammar.contains(r#"{"type":"integer"}"#), "{grammar}");
    assert_eq!(answer.json()["text"]["format"]["name"], "n");
}

async fn storing(max_stored_responses: usize) -> Server {
    let tokens = [bytes("<think>hm</think>Well"), call(r#"{"name": "f", "arguments": {}}"#), vec![IM_END]].concat();
    let store = move |config: &mut Config| config.max_stored_responses = max_stored_responses;
    server_with_config(store, move |sequence| sequence.answer(&tokens)).await
}

#[tokio::test]
async fn a_stored_response_is_continued_as_the_whole_conversation_would_be() {
    let server = storing(2).await;
    for stream in [false, true] {
        let fields = json!({"instructions": "Help.", "tools": [tool("f")], "stream": stream});
        let first = server.post(PATH, hello(fields)).await;
        let first = if stream { response_fold(&first) } else { first.json() };
        assert_eq!(first["store"], true);
        let output = first["output"].as_array().unwrap();
        let result = json!({"type": "function_call_output", "call_id": output[2]["call_id"], "output": "rain"});
        let fields = json!({"previous_response_id": first["id"], "input": [result], "tools": [tool("f")]});
        let answer = server.post(PATH, hello(fields)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        assert_eq!(answer.json()["previous_response_id"], first["id"]);
        let continued = prompt(&server);
        let mut input = vec![json!({"role": "user", "content": "Hi"})];
        input.extend(output.iter().cloned().chain([result]));
        server.post(PATH, hello(json!({"input": input, "tools": [tool("f")]}))).await;
        assert_eq!(prompt(&server), continued);
        assert!(!continued.contains("Help.") && continued.contains("tool:rain"), "{continued}");
        let mut without = hello(json!({"previous_response_id": answer.json()["id"]}));
        without["input"] = Value::Null;
        for route in ["", "/input_tokens", "/compact"] {
            let answer = server.post(&format!("{PATH}{route}"), without.clone()).await;
            // Without `input` the conversation is the stored one, which ends with a call.
            assert!(answer.body.contains("has no result"), "{route}: {}", answer.body);
        }
    }
}

#[tokio::test]
async fn a_response_that_is_not_stored_cannot_be_continued() {
    for (max_stored, store, message) in [(0, true, "this server stores no responses"), (2, false, "was not found")] {
        let server = storing(max_stored).await;
        let first = server.post(PATH, hello(json!({"store": store, "tools": [tool("f")]}))).await.json();
        assert_eq!(first["store"], false);
        let answer = server.post(PATH, hello(json!({"previous_response_id": first["id"]}))).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], "previous_response_id");
        assert_eq!(error["code"], "previous_response_not_found");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    }
}

#[tokio::test]
async fn a_custom_tool_is_called_with_free_form_input() {
    let tokens = [call(r#"{"name": "n__patch", "arguments": {"input": "+a\n\"é\""}}"#), vec![IM_END]].concat();
    let server = server(move |sequence| sequence.answer(&tokens)).await;
    let tools = json!([{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "patch"}]}]);
    let choice = json!({"type": "custom", "namespace": "n", "name": "patch"});
    let body = hello(json!({"tools": tools, "tool_choice": choice}));
    let plain = server.post(PATH, body.clone()).await;
    let item = plain.json()["output"][0].clone();
    insta::assert_snapshot!(stable(&item.to_string()), @r#"{"type":"custom_tool_call","id":"ctc_ID","status":"completed","call_id":"call_ID","name":"patch","namespace":"n","input":"+a\n\"é\""}"#);
    let streamed = server.post(PATH, with(body, json!({"stream": true}))).await;
    assert_eq!(stable(&response_fold(&streamed).to_string()), stable(&plain.json().to_string()));
    let events = streamed.typed_events();
    let deltas = events.iter().filter(|event| event["type"] == "response.custom_tool_call_input.delta");
    let input: String = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(input, "+a\n\"é\"");
    assert!(events.iter().any(|event| event["type"] == "response.custom_tool_call_input.done"));
}

#[tokio::test]
async fn logprobs_of_the_text_are_included_on_request() {
    let tokens = [bytes("<think>hm</think>"), vec![word("Hello"), word(" world"), IM_END]].concat();
    let server = server(move |sequence| sequence.answer(&tokens)).await;
    let body = hello(json!({"include": ["message.output_text.logprobs"], "top_logprobs": 1}));
    let plain = server.post(PATH, body.clone()).await;
    let part = plain.json()["output"][1]["content"][0].clone();
    let tokens: Vec<_> = part["logprobs"].as_array().unwrap().iter().map(|token| token["token"].clone()).collect();
    assert_eq!(tokens, ["Hello", " world"]);
    assert_eq!(plain.json()["top_logprobs"], 1);
    let streamed = server.post(PATH, with(body, json!({"stream": true}))).await;
    assert_eq!(stable(&response_fold(&streamed).to_string()), stable(&plain.json().to_string()));
    let without = server.post(PATH, hello(json!({"top_logprobs": 1}))).await.json();
    assert_eq!(without["output"][1]["content"][0]["logprobs"], json!([]));
}

/// A request without a body. `key`: its API key.
async fn ask(server: &Server, method: &str, path: &str, key: &str) -> Answer {
    whole(server.send(server.request(method, path).header("authorization", format!("Bearer {key}")), "").await).await
}

async fn post(server: &Server, body: Value, key: &str) -> Answer {
    let request = server.request("POST", PATH).header("content-type", "application/json");
    whole(server.send(request.header("authorization", format!("Bearer {key}")), &body.to_string()).await).await
}

#[tokio::test]
async fn a_stored_response_belongs_to_the_key_that_made_it() {
    let tokens = [word("Hello"), IM_END];
    let adjust = |config: &mut Config| {
        config.max_stored_responses = 4;
        config.api_keys = ApiKeys::new(["one".to_owned(), "two".to_owned()]);
    };
    let server = server_with_config(adjust, move |sequence| sequence.answer(&tokens)).await;
    let first = post(&server, hello(json!({"instructions": "Help."})), "one").await.json();
    let (path, item) = (format!("{PATH}/{}", first["id"].as_str().unwrap()), first["output"][0]["id"].clone());
    assert_eq!(ask(&server, "GET", &path, "one").await.json(), first);

    let reference = json!({"input": [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": item},
                                     {"role": "user", "content": "And?"}]});
    assert_eq!(post(&server, hello(reference.clone()), "one").await.status, StatusCode::OK);
    let referred = prompt(&server);
    let second =
        post(&server, hello(json!({"previous_response_id": first["id"], "input": "And?"})), "one").await.json();
    assert_eq!(prompt(&server), referred);
    assert!(referred.contains("user:Hi\nassistant:Hello\nuser:And?"), "{referred}");

    let items = format!("{PATH}/{}/input_items", second["id"].as_str().unwrap());
    let list = ask(&server, "GET", &format!("{items}?order=asc"), "one").await.json();
    let texts: Vec<_> =
        list["data"].as_array().unwrap().iter().map(|item| item["content"][0]["text"].clone()).collect();
    assert_eq!(texts, ["Hi", "Hello", "And?"]);
    assert_eq!((&list["object"], &list["has_more"]), (&json!("list"), &json!(false)));
    assert_eq!((&list["first_id"], &list["last_id"]), (&list["data"][0]["id"], &list["data"][2]["id"]));
    let page =
        ask(&server, "GET", &format!("{items}?limit=1&after={}", list["last_id"].as_str().unwrap()), "one").await;
    assert_eq!((&page.json()["data"], &page.json()["has_more"]), (&json!([list["data"][1]]), &json!(true)));
    for query in ["limit=0", "limit=101", "limit=a", "order=up", "after=x"] {
        let answer = ask(&server, "GET", &format!("{items}?{query}"), "one").await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{query}: {}", answer.body);
    }
    assert_eq!(ask(&server, "GET", &format!("{path}?stream=true"), "one").await.status, StatusCode::BAD_REQUEST);

    for (method, path) in [("GET", path.clone()), ("GET", format!("{path}/input_items")), ("DELETE", path.clone())] {
        let answer = ask(&server, method, &path, "two").await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{method} {path}");
        assert_eq!(answer.json()["error"]["code"], "not_found");
    }
    for body in [json!({"previous_response_id": first["id"]}), reference] {
        assert_eq!(post(&server, hello(body), "two").await.status, StatusCode::BAD_REQUEST);
    }
    let cancel = format!("{path}/cancel");
    assert_eq!(ask(&server, "POST", &cancel, "two").await.status, StatusCode::NOT_FOUND);
    let refused = ask(&server, "POST", &cancel, "one").await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert!(refused.body.contains("only responses with `background` true can be cancelled"), "{}", refused.body);
    let deleted = ask(&server, "DELETE", &path, "one").await.json();
    assert_eq!(deleted, json!({"id": first["id"], "object": "response", "deleted": true}));
    for method in ["GET", "DELETE"] {
        assert_eq!(ask(&server, method, &path, "one").await.status, StatusCode::NOT_FOUND);
    }
}
