//! A mock worker: speaks the worker protocol, takes a configured time per step, and answers each sample with one of its
//! configured tokens, so that only the router is measured. Which one it is depends on the sequence's tokens as its KV
//! blocks hold them (`cache`).

mod cache;

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use futures::StreamExt;
use futures::stream::BoxStream;
use penstock_proto as proto;
use penstock_proto::Frames;
use penstock_proto::worker_server::{Worker, WorkerServer};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::Instant;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::codec::{FramedRead, FramedWrite};
use tonic::{Request, Response, Status, Streaming};

use cache::{BLOCK_TOKENS, Cache, numbers};

const MAX_MESSAGE_BYTES: usize = 1 << 30;

/// Replaces a Python worker under the fork server; its own settings come from environment variables.
#[derive(Clone, Debug, Parser)]
struct Args {
    #[arg(long)]
    socket: PathBuf,
    #[arg(long)]
    rank: u32,
    #[arg(long)]
    world_size: u32,
    /// Name of the process
    #[arg(long)]
    name: String,
    /// Microseconds per step
    #[arg(long, env = "SCRIPT_STEP_MICROSECONDS", default_value_t = 1000)]
    step_microseconds: u64,
    /// Additional nanoseconds per prompt token
    #[arg(long, env = "SCRIPT_PROMPT_TOKEN_NANOSECONDS", default_value_t = 0)]
    prompt_token_nanoseconds: u64,
    /// Additional nanoseconds per generated token
    #[arg(long, env = "SCRIPT_NEW_TOKEN_NANOSECONDS", default_value_t = 0)]
    new_token_nanoseconds: u64,
    /// Token ids to answer with
    #[arg(long, env = "SCRIPT_TOKEN_IDS", value_delimiter = ',', required = true)]
    token_ids: Vec<u32>,
    #[arg(long, env = "SCRIPT_VOCABULARY", default_value_t = 49152)]
    vocabulary: u32,
    #[arg(long, env = "SCRIPT_MAX_POSITION_TOKENS", default_value_t = 65536)]
    max_position_tokens: u32,
    #[arg(long, env = "SCRIPT_NUM_BLOCKS", default_value_t = 65536)]
    num_blocks: u64,
}

struct Script {
    args: Args,
}

#[tonic::async_trait]
impl Worker for Script {
    async fn load(&self, _: Request<proto::LoadRequest>) -> Result<Response<proto::LoadResponse>, Status> {
        Ok(Response::new(proto::LoadResponse {
            protocol_version: proto::ProtocolVersion::Current as u32,
            architecture: "script".to_owned(),
            dtype: "bfloat16".to_owned(),
            device: "cpu".to_owned(),
            attention: "none".to_owned(),
            vocab_size: self.args.vocabulary,
            block_tokens: BLOCK_TOKENS as u32,
            max_position_tokens: self.args.max_position_tokens,
            kv_bytes_per_block: 1,
            ..Default::default()
        }))
    }

    async fn warm_up(&self, _: Request<proto::WarmUpRequest>) -> Result<Response<proto::WarmUpResponse>, Status> {
        Ok(Response::new(proto::WarmUpResponse { num_blocks: self.args.num_blocks, ..Default::default() }))
    }

    async fn compile_grammar(
        &self,
        _: Request<proto::CompileGrammarRequest>,
    ) -> Result<Response<proto::CompileGrammarResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn load_adapter(
        &self,
        _: Request<proto::LoadAdapterRequest>,
    ) -> Result<Response<proto::LoadAdapterResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn encode_images(
        &self,
        _: Request<proto::EncodeImagesRequest>,
    ) -> Result<Response<proto::EncodeImagesResponse>, Status> {
        Err(Status::unimplemented("there are no images"))
    }

    async fn health(&self, _: Request<proto::HealthRequest>) -> Result<Response<proto::HealthResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    type StepsStream = BoxStream<'static, Result<proto::StepResult, Status>>;

    async fn steps(&self, _: Request<Streaming<proto::Plan>>) -> Result<Response<Self::StepsStream>, Status> {
        Err(Status::unimplemented("steps have a socket of their own"))
    }
}

/// Executes the steps of one stream.
async fn execute_steps(connection: UnixStream, args: Args) {
    let (reader, writer) = connection.into_split();
    let plans = FramedRead::new(reader, Frames::<proto::Plan>::default());
    let cache = Cache::new(args.num_blocks as usize);
    let results = futures::stream::unfold((plans, cache, Instant::now()), |(mut plans, mut cache, free_at)| {
        let args = args.clone();
        async move {
            let plan = plans.next().await?.ok()?.ok()?;
            // Like a device, starts the next step at once when its plan is already here.
            let ends_at = free_at.max(Instant::now()) + duration(&args, &plan);
            tokio::time::sleep_until(ends_at).await;
            let result = execute(&args, &mut cache, &plan);
            Some((Ok(Ok(result)), (plans, cache, ends_at)))
        }
    });
    // The router may leave at any time.
    let _ = results.forward(FramedWrite::new(writer, Frames::<proto::StepResult>::default())).await;
}

fn duration(args: &Args, plan: &proto::Plan) -> Duration {
    let Some(advances) = &plan.advances else { return Duration::from_micros(args.step_microseconds) };
    let num_tokens: u64 = numbers(&advances.num_tokens, u32::from_le_bytes).map(u64::from).sum();
    let num_new_tokens = advances.sample.iter().map(|sample| u64::from(*sample)).sum::<u64>();
    let num_prompt_tokens = num_tokens.saturating_sub(num_new_tokens);
    Duration::from_micros(args.step_microseconds)
        + Duration::from_nanos(
            args.prompt_token_nanoseconds * num_prompt_tokens + args.new_token_nanoseconds * num_new_tokens,
        )
}

fn execute(args: &Args, cache: &mut Cache, plan: &proto::Plan) -> proto::StepResult {
    let mut sampled = proto::Tokens::default();
    let mut sequence_ids = Vec::new();
    let choose = |number: u64| args.token_ids[(number % args.token_ids.len() as u64) as usize];
    for (sequence_id, token_id) in cache.execute(plan, choose) {
        sequence_ids.extend(sequence_id.to_le_bytes());
        sampled.ids.extend(token_id.to_le_bytes());
        sampled.logprobs.extend((-0.5_f32).to_le_bytes());
    }
    let (sampled, timing) = (Some(sampled), Some(proto::StepTiming::default()));
    proto::StepResult { step: plan.step, sequence_ids, sampled, timing, ..Default::default() }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // The fork server gave it to the process that became this one.
    std::fs::write("/proc/self/comm", &args.name)?;
    let mut streams = UnixListenerStream::new(UnixListener::bind(proto::steps_socket(&args.socket))?);
    tokio::spawn({
        let args = args.clone();
        async move {
            while let Some(Ok(connection)) = streams.next().await {
                tokio::spawn(execute_steps(connection, args.clone()));
            }
        }
    });
    let listener = UnixListenerStream::new(UnixListener::bind(&args.socket)?);
    let service = WorkerServer::new(Script { args })
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    tonic::transport::Server::builder().add_service(service).serve_with_incoming(listener).await?;
    Ok(())
}
