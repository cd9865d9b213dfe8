//! One rank: a gRPC channel to its endpoint, and if that is a unix socket, a connection to the one for steps beside it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use futures::stream::{self, BoxStream, Stream, StreamExt, TryStreamExt};
use penstock_proto as proto;
use penstock_proto::Frames;
use penstock_proto::worker_client::WorkerClient;
use tokio::net::UnixStream;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::time::Instant;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::codec::{FramedRead, FramedWrite};
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;

use super::progress::{DeviceProgress, RankProgress};
use super::{Endpoint, WorkerError};

/// Time between two attempts to connect to an endpoint on which no worker listens yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Clone, Debug)]
pub(super) struct Rank {
    index: usize,
    endpoint: Endpoint,
    client: WorkerClient<Channel>,
}

impl Rank {
    /// Waits until the worker listens and answers, for at most `timeout`.
    pub(super) async fn connect(index: usize, endpoint: &Endpoint, timeout: Duration) -> Result<Self, WorkerError> {
        let deadline = Instant::now() + timeout;
        loop {
            let reason = match Self::open(index, endpoint).await {
                Ok(mut rank) => match rank.health().await {
                    Ok(_) => return Ok(rank),
                    Err(error) => error.to_string(),
                },
                Err(reason) => reason,
            };
            if Instant::now() + RETRY_INTERVAL > deadline {
                return Err(WorkerError::Unreachable {
                    rank: index,
                    endpoint: endpoint.to_string(),
                    waited: timeout,
                    reason,
                });
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    /// Opens a new connection to the same worker, which the current runtime drives.
    pub(super) async fn reconnect(&self) -> Result<Self, WorkerError> {
        let Self { index, endpoint, .. } = self;
        Self::open(*index, endpoint).await.map_err(|reason| WorkerError::Lost { rank: *index, reason })
    }

    async fn open(index: usize, endpoint: &Endpoint) -> Result<Self, String> {
        let channel = endpoint.connect().await?;
        // A plan that starts many long prompts exceeds gRPC's default limit of 4 MiB.
        let client = WorkerClient::new(channel)
            .max_decoding_message_size(i32::MAX as usize)
            .max_encoding_message_size(i32::MAX as usize);
        Ok(Self { index, endpoint: endpoint.clone(), client })
    }

    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// A health check.
    pub(super) async fn health(&mut self) -> Result<RankProgress, WorkerError> {
        let answer = self.client.health(proto::HealthRequest {}).await.map_err(|status| self.error(&status))?;
        let answer = answer.into_inner();
        Ok(RankProgress {
            processor_time: Duration::try_from_secs_f64(answer.processor_seconds).unwrap_or_default(),
            device: answer
                .device
                .map(|device| DeviceProgress { num_finished: device.num_finished, is_busy: device.is_busy }),
            is_backing_pool: answer.is_backing_pool,
        })
    }

    pub(super) async fn load(&mut self, request: proto::LoadRequest) -> Result<proto::LoadResponse, WorkerError> {
        let ours = request.protocol_version;
        let answer = self.client.load(request).await.map_err(|status| self.error(&status))?.into_inner();
        if answer.protocol_version != ours {
            return Err(WorkerError::Version { rank: self.index, theirs: answer.protocol_version, ours });
        }
        Ok(answer)
    }

    pub(super) async fn warm_up(
        &mut self,
        request: proto::WarmUpRequest,
    ) -> Result<proto::WarmUpResponse, WorkerError> {
        let answer = self.client.warm_up(request).await.map_err(|status| self.error(&status))?;
        Ok(answer.into_inner())
    }

    pub(super) async fn compile_grammar(
        &mut self,
        request: proto::CompileGrammarRequest,
    ) -> Result<proto::CompileGrammarResponse, WorkerError> {
        let answer = self.client.compile_grammar(request).await.map_err(|status| self.error(&status))?;
        Ok(answer.into_inner())
    }

    pub(super) async fn load_adapter(
        &mut self,
        request: proto::LoadAdapterRequest,
    ) -> Result<proto::LoadAdapterResponse, WorkerError> {
        let answer = self.client.load_adapter(request).await.map_err(|status| self.error(&status))?;
        Ok(answer.into_inner())
    }

    pub(super) async fn encode_images(
        &mut self,
        request: proto::EncodeImagesRequest,
    ) -> Result<proto::EncodeImagesResponse, WorkerError> {
        let answer = self.client.encode_images(request).await.map_err(|status| self.error(&status))?;
        Ok(answer.into_inner())
    }

    /// Opens the stream of steps. Plans go into the sender; their results come out of the stream in the same order.
    pub(super) fn steps(
        &self,
    ) -> (UnboundedSender<proto::Plan>, BoxStream<'static, Result<proto::StepResult, WorkerError>>) {
        let (plans, receiver) = mpsc::unbounded_channel();
        let receiver = UnboundedReceiverStream::new(receiver);
        let Self { index, endpoint, mut client } = self.clone();
        let results = match endpoint {
            Endpoint::Unix(socket) => {
                let socket = proto::steps_socket(&socket);
                let results = stream::once(steps_over_socket(socket, receiver)).try_flatten();
                let results =
                    results.map_err(move |error| WorkerError::Lost { rank: index, reason: error.to_string() });
                results.map(move |result| result?.map_err(|status| WorkerError::of_status(index, &status))).boxed()
            }
            Endpoint::Tcp { .. } => {
                // A gRPC server may hold back its response headers until its first message, so the call is made with the first
                // read.
                let results = stream::once(async move { client.steps(receiver).await });
                let results = results.map_ok(tonic::Response::into_inner).try_flatten();
                results.map_err(move |status| WorkerError::of_status(index, &status)).boxed()
            }
        };
        (plans, results)
    }

    fn error(&self, status: &tonic::Status) -> WorkerError {
        WorkerError::of_status(self.index, status)
    }
}

/// Opens a stream of steps on this socket.
async fn steps_over_socket(
    socket: PathBuf,
    plans: UnboundedReceiverStream<proto::Plan>,
) -> io::Result<impl Stream<Item = io::Result<Result<proto::StepResult, tonic::Status>>>> {
    let (reader, writer) = UnixStream::connect(socket).await?.into_split();
    let sending = plans.map(|plan| Ok(Ok(plan))).forward(FramedWrite::new(writer, Frames::default()));
    // Its outcome is not needed: where plans cannot be sent, the results end or fail as well.
    let sending = AbortOnDropHandle::new(tokio::spawn(sending));
    Ok(FramedRead::new(reader, Frames::default()).inspect(move |_| _ = &sending))
}
