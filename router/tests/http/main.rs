//! The router over real HTTP, with an engine that the test scripts.
#![allow(clippy::unwrap_used, unreachable_pub, reason = "helpers of tests are tests")]

mod adapter;
mod admission;
mod auth;
mod chat;
mod chat_template;
mod completion;
mod connection;
mod document;
mod draft;
mod drain;
mod encoder_decoder;
mod error;
mod fault;
mod fold;
mod fold_property;
mod generate;
mod messages;
mod messages_input;
mod model;
mod openai;
mod playground;
mod request_id;
mod responses;
mod responses_input;
mod server;
mod status;
mod stream;
mod tgi_candidate;
mod tgi_dispatch;
mod tgi_fold;
mod tgi_odd_input;
mod tgi_order;
mod tool;
mod unread;
mod vllm;
