//! Images in requests: from data URIs and URLs, in every dialect, and in token counts.

use axum::http::StatusCode;
use penstock_router::config::{AdapterConfig, AdapterSource};
use penstock_router::sequence::ImageInput;
use penstock_router::{Config, ImageUrlConfig};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::fold::with;
use crate::model::{self, IM_END};
use crate::server::{PLACEHOLDER_ID, Server};

/// An image in a text is one byte, whose token is `PLACEHOLDER_ID`.
const PLACEHOLDER: &str = "\u{7}";
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}\
    {% for p in m.content %}{{ '\u{7}' if p.type == 'image' else p.text }}{% endfor %}{% endif %}|{% endfor %}";
/// The file "hello", whose image is five tokens.
const HELLO: &str = "data:image/png;base64,aGVsbG8=";
const TEXT: &str = "/v1/chat/completions";

async fn server(adjust: impl FnOnce(&mut Config)) -> Server {
    let script = |sequence: crate::server::Sequence| sequence.answer(&[IM_END]);
    Server::start(script, |config| {
        model::write_with_template(&config.model_folder, &json!(TEMPLATE));
        (config.limits.max_input_tokens, config.limits.max_total_tokens) = (800, 900);
        config.image_input = Some(ImageInput {
            placeholder_id: PLACEHOLDER_ID,
            placeholder: PLACEHOLDER.to_owned(),
            template_text: String::new(),
            is_whole: false,
            is_prompt_whole: false,
            text_prefix: String::new(),
            text_suffix: String::new(),
            max_bytes: 100,
            has_adapter: false,
        });
        adjust(config);
    })
    .await
}

/// Fetches from this machine.
fn fetches(config: &mut Config) {
    let allowed_hosts = vec!["127.0.0.1".parse().unwrap()];
    config.image_urls = Some(ImageUrlConfig { allowed_hosts, max_bytes: 1000 });
}

/// The URL of a server of files: `/NAME` is a file with its name, without the slash; `/missing` is none.
async fn files() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let head = head_of(&mut stream).await;
            let name = head.split(' ').nth(1).unwrap().trim_start_matches('/');
            let status = if name == "missing" { "404 Not Found" } else { "200 OK" };
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{name}", name.len());
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    url
}

async fn head_of(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

fn openai(parts: Value) -> Value {
    json!({"messages": [{"role": "user", "content": parts}], "max_tokens": 5})
}

fn image_url(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url, "detail": "high"}})
}

/// A request with an image, in each dialect, and where the image is in it.
fn requests(url: &str) -> [(&'static str, Value, &'static str); 5] {
    let claude = json!({"type": "image", "source": {"type": "url", "url": url}});
    let input = json!({"type": "input_image", "image_url": url, "detail": "auto"});
    let response = json!({"model": "test/model", "input": [{"role": "user", "content": [input]}]});
    let messages = json!([{"role": "user", "content": [claude]}]);
    [
        (TEXT, openai(json!([image_url(url)])), "messages[0].content[0].image_url"),
        ("/v1/messages", json!({"model": "m", "max_tokens": 5, "messages": messages}), "messages[0].content[0].source"),
        ("/v1/responses", response, "input[0].content[0].image_url"),
        ("/generate", json!({"inputs": format!("a![]({url})b")}), "`inputs`, image 1"),
        ("/", json!({"inputs": format!("a![]({url})b")}), "`inputs`, image 1"),
    ]
}

#[tokio::test]
async fn every_dialect_takes_images_from_urls() {
    let (server, files) = (server(fetches).await, files().await);
    for (path, body, _) in requests(&format!("{files}/picture")) {
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.body);
        let request = server.last_request();
        let images: Vec<_> = request.images.iter().map(|span| span.image.data()).collect();
        assert_eq!(images, [b"picture"], "{path}");
        let num_placeholders = request.prompt_token_ids.iter().filter(|&&id| id == PLACEHOLDER_ID).count();
        assert_eq!(num_placeholders, "picture".len(), "{path}");
    }
}

#[tokio::test]
async fn an_image_that_cannot_be_fetched_is_named() {
    let (closed, open, files) = (server(|_| ()).await, server(fetches).await, files().await);
    let refusal = async |server: &Server, url: &str, problem: &str| {
        for (path, body, place) in requests(url) {
            let answer = server.post(path, body).await;
            let message = answer.body.replace("\\\"", "\"");
            assert!(answer.status.is_client_error(), "{path}: {message}");
            assert!(message.contains(&format!("{place}: ")) && message.contains(problem), "{path}: {message}");
        }
    };
    refusal(&closed, "http://127.0.0.1/a.png", "its --allow-image-urls would. Given: \"http://127.0.0.1/a.png\"").await;
    refusal(&open, "ftp://127.0.0.1/a.png", "its scheme must be http or https").await;
    refusal(&open, "http://127.0.0.2/a.png", "127.0.0.2 has no public address").await;
    refusal(&open, &format!("{files}/missing"), "127.0.0.1 answered with status 404").await;
    refusal(&open, &format!("{files}/"), "the image is empty").await;
    refusal(&open, &format!("{files}/{}", "x".repeat(1001)), "more than 1000 bytes").await;
}

#[tokio::test]
async fn a_request_whose_images_the_workers_cannot_take_now_meets_an_overload() {
    let server = server(|_| ()).await;
    let answer = server.post(TEXT, openai(json!([image_url("data:image/png;base64,YnVzeQ==")]))).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS, "{}", answer.body);
    assert_eq!(answer.header("retry-after"), "1");
    assert_eq!(answer.json()["error"]["code"], "overloaded");
    assert!(answer.body.contains("too many images wait to be encoded"), "{}", answer.body);
}

#[tokio::test]
async fn images_for_which_the_workers_have_no_room_are_refused_before_they_reach_the_engine() {
    let server = server(|config| config.image_input.as_mut().unwrap().max_bytes = 1).await;
    let other = "data:image/png;base64,d29ybGQ=";
    let answer = server.post(TEXT, openai(json!([image_url(HELLO), image_url(other)]))).await;
    assert!(answer.status.is_client_error(), "{}", answer.body);
    assert!(answer.body.contains("the images take 2 bytes of the workers' room for images, at most 1 are allowed"));
    let text = json!({"type": "text", "text": "and again"});
    let answer = server.post(TEXT, openai(json!([image_url(HELLO), text, image_url(HELLO)]))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(server.last_request().images.len(), 2, "the same image takes the room once");
}

#[tokio::test]
async fn nothing_is_fetched_for_a_prompt_without_a_place() {
    let server = server(fetches).await;
    // It would be refused otherwise: nothing listens there.
    let text = json!({"type": "text", "text": PLACEHOLDER});
    let answer = server.post(TEXT, openai(json!([text, image_url("http://127.0.0.1:1/")]))).await;
    assert!(answer.body.contains("the prompt has 2 places for images, but 1 images were given"), "{}", answer.body);
}

#[tokio::test]
async fn a_request_whose_image_is_being_fetched_holds_no_place_of_an_adapter() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/a.png", listener.local_addr().unwrap());
    let source = |name: &str| AdapterSource { name: name.to_owned(), path: format!("/of/{name}").into() };
    let sources = ["fetching", "other"].map(source).into();
    let server = server(|config| {
        fetches(config);
        config.adapters = AdapterConfig { sources, max_loaded: 1, can_change: false };
    })
    .await;
    let other = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        head_of(&mut stream).await;
        let answer = server.post(TEXT, with(openai(json!("Hi")), json!({"model": "other"}))).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na").await.unwrap();
        answer
    };
    let body = with(openai(json!([image_url(&url)])), json!({"model": "fetching"}));
    let (fetching, other) = tokio::join!(server.post(TEXT, body), other);
    assert_eq!([fetching.status, other.status], [StatusCode::OK; 2], "{} {}", fetching.body, other.body);
    assert_eq!(*server.engine.loads.lock().unwrap(), [(2, vec![]), (1, vec![2])]);
}

#[tokio::test]
async fn the_results_of_calls_can_have_images() {
    let server = server(|_| ()).await;
    let function = json!({"name": "f", "arguments": "{}"});
    let calls = json!([{"id": "c", "type": "function", "function": function}]);
    let output = json!([{"type": "text", "text": "seen:"}, image_url(HELLO)]);
    let openai = json!({"max_tokens": 5, "messages": [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": output},
        {"role": "user", "content": [image_url("data:;base64,Yg==")]}]});
    let source = |data| json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}});
    let seen = json!([{"type": "text", "text": "seen:"}, source("aGVsbG8=")]);
    let anthropic = json!({"model": "m", "max_tokens": 5, "messages": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [source("Yg=="), {"type": "tool_result", "tool_use_id": "c", "content": seen}]}]});
    let input = |url| json!({"type": "input_image", "image_url": url});
    let responses = json!({"model": "test/model", "input": [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "seen:"}, input(HELLO)]},
        {"role": "user", "content": [input("data:;base64,Yg==")]}]});
    for (path, body) in [(TEXT, openai), ("/v1/messages", anthropic), ("/v1/responses", responses)] {
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.body);
        let request = server.last_request();
        let images: Vec<_> = request.images.iter().map(|span| span.image.data()).collect();
        assert_eq!(images, [b"hello".as_slice(), b"b"], "{path}: in the order of the prompt");
        let expected = format!("assistant:|tool:seen:{}|user:{PLACEHOLDER}|", PLACEHOLDER.repeat(5));
        assert_eq!(request.prompt_token_ids, model::bytes(&expected), "{path}");
    }
}

#[tokio::test]
async fn the_tokens_of_images_are_counted() {
    let server = server(|_| ()).await;
    let prompt = server.post(TEXT, openai(json!([image_url(HELLO)]))).await.json();
    let expected = prompt["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(expected, "user:|".len() as u64 + 5);
    let [_, (_, messages, _), ..] = requests(HELLO);
    let counted = server.post("/v1/messages/count_tokens", messages).await.json();
    assert_eq!(counted, json!({"input_tokens": expected}));
    let tokenized = server.post("/tokenize", openai(json!([image_url(HELLO)]))).await.json();
    assert_eq!(
        (&tokenized["count"], tokenized["tokens"].as_array().unwrap().len()),
        (&json!(expected), expected as usize)
    );
    let chat = server.post("/chat_tokenize", openai(json!([image_url(HELLO)]))).await.json();
    assert_eq!(chat["tokenize_response"].as_array().unwrap().len(), expected as usize);
    let inputs = server.post("/tokenize", json!({"inputs": format!("a![]({HELLO})b")})).await.json();
    let places: Vec<_> = inputs.as_array().unwrap().iter().map(|token| token["start"].as_u64().unwrap()).collect();
    assert_eq!(places, [0, 1, 1, 1, 1, 1, 2], "each token of the image is where its placeholder is");
}

#[tokio::test]
async fn another_level_of_detail_is_refused() {
    let server = server(|_| ()).await;
    for (detail, status) in [("auto", 200), ("low", 200), ("high", 200), ("original", 200), ("medium", 400)] {
        let part = json!({"type": "image_url", "image_url": {"url": HELLO, "detail": detail}});
        let chat = server.post(TEXT, openai(json!([part]))).await;
        let part = json!({"type": "input_image", "image_url": HELLO, "detail": detail});
        let body = json!({"model": "test/model", "input": [{"role": "user", "content": [part]}]});
        let response = server.post("/v1/responses", body).await;
        assert_eq!((chat.status.as_u16(), response.status.as_u16()), (status, status), "{detail}");
        if status == 400 {
            let problem = "detail: must be `auto`, `low`, `high` or `original`. Given: \\\"medium\\\"";
            assert!(chat.body.contains(problem) && response.body.contains(problem), "{}", chat.body);
        }
    }
}

#[tokio::test]
async fn prompts_are_separated_from_their_first_different_image_on() {
    let server = server(|_| ()).await;
    let salts = async |urls: &[&str], fields: Value| {
        let parts: Vec<_> = urls.iter().map(|url| image_url(url)).collect();
        server.post(TEXT, with(openai(json!(parts)), fields)).await;
        let request = server.last_request();
        (request.cache_salt, request.content_salts)
    };
    let (salt, one) = salts(&[HELLO], json!({})).await;
    let (_, two) = salts(&[HELLO, "data:;base64,Yg=="], json!({})).await;
    let (_, other) = salts(&["data:;base64,d29ybGQ="], json!({})).await;
    assert_eq!((salt, one.len(), two.len()), (None, 1, 2));
    assert_eq!((one[0], two[1].offset), (two[0], one[0].offset + 5));
    assert!(other[0].offset == one[0].offset && other[0].salt != one[0].salt);
    let (salt, same) = salts(&[HELLO], json!({"cache_salt": "mine"})).await;
    assert!(salt.is_some() && same == one);
}

#[tokio::test]
async fn prompts_with_the_models_own_adapter_are_separated_from_text() {
    let server = server(|config| config.image_input.as_mut().unwrap().has_adapter = true).await;
    let salt = async |parts: Value, fields: Value| {
        server.post(TEXT, with(openai(parts), fields)).await;
        server.last_request().cache_salt
    };
    let text = json!([{"type": "text", "text": "a"}]);
    let image = json!([image_url(HELLO)]);
    let other = json!([image_url("data:;base64,Yg=="), image_url(HELLO)]);
    let own = salt(image.clone(), json!({})).await;
    assert!(own.is_some() && own == salt(other, json!({})).await);
    assert_eq!(salt(text.clone(), json!({})).await, None);
    let mine = json!({"cache_salt": "mine"});
    let (salted_text, salted_image) = (salt(text, mine.clone()).await, salt(image, mine).await);
    assert!(salted_text.is_some() && salted_image != salted_text && salted_image != own);
}
