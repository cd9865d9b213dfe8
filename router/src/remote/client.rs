//! The router's client of one server.

use std::time::Duration;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use penstock_proto::engine as proto;
use penstock_proto::engine::engine_client::EngineClient;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use super::{
    Access, CONNECTION_WINDOW_BYTES, MAX_MESSAGE_BYTES, RemoteError, ServerDescription, ServerState, UrlError, convert,
};
use crate::sequence::{EncodedImage, Grammar, Image, ImageError, SequenceEvent, SequenceRequest};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The server's own limit for its workers.
const GRAMMAR_TIMEOUT: Duration = Duration::from_secs(180);
/// More than the server's own limit for its workers, 300 s, so that its answer arrives, which tells an overload from a failure.
const IMAGE_TIMEOUT: Duration = Duration::from_secs(330);
/// Bytes of a message that are left for images and tokens.
const MAX_CONTENT_BYTES: usize = MAX_MESSAGE_BYTES - (1 << 20);
/// Most bytes of a token id in a message.
const MAX_TOKEN_BYTES: usize = 5;

/// A server that may be used, connected or not.
#[derive(Clone, Debug)]
pub struct Remote {
    url: String,
    endpoint: Endpoint,
    bearer: Bearer,
}

/// A connection to a server. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    engine: EngineClient<InterceptedService<Channel, Bearer>>,
}

/// What happened to a sequence on a server. An error is the last one.
pub(crate) type SequenceUpdate = Result<Vec<SequenceEvent>, RemoteError>;

/// Adds the secret to each call.
#[derive(Clone, Debug)]
pub(crate) struct Bearer(MetadataValue<Ascii>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("authorization", self.0.clone());
        Ok(request)
    }
}

impl Remote {
    /// Checks the URL of a server's `--engine-listen`.
    pub fn new(url: &str, access: &Access) -> Result<Self, UrlError> {
        let (uri, tls) = access.client(url)?;
        let url =
            format!("{}://{}", uri.scheme_str().unwrap_or_default(), uri.authority().map_or("", |it| it.as_str()));
        let tls_error = |error: tonic::transport::Error| UrlError::Tls(RemoteError::of_transport(&error).to_string());
        let endpoint = Endpoint::from(uri)
            .connect_timeout(CONNECT_TIMEOUT)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .tcp_nodelay(true);
        let endpoint = match tls {
            Some(tls) => endpoint.tls_config(tls).map_err(tls_error)?,
            None => endpoint,
        };
        let mut bearer: MetadataValue<Ascii> =
            format!("Bearer {}", access.secret).parse().map_err(|_| UrlError::Tls("the secret".to_owned()))?;
        bearer.set_sensitive(true);
        Ok(Self { url: url.to_lowercase(), endpoint, bearer: Bearer(bearer) })
    }

    /// Scheme, host and port, in lower case: equal for two spellings of one URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Connects, and asks what the server serves.
    pub async fn describe(&self) -> Result<ServerDescription, RemoteError> {
        Ok(self.connect().await?.1)
    }

    pub(crate) async fn connect(&self) -> Result<(Client, ServerDescription), RemoteError> {
        let connect = async {
            let channel = self.endpoint.connect().await.map_err(|error| RemoteError::of_transport(&error))?;
            let engine = EngineClient::with_interceptor(channel, self.bearer.clone())
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES);
            let mut client = Client { engine };
            let description = client.engine.describe(proto::DescribeRequest {}).await.map_err(refused)?;
            Ok((client, convert::described(description.into_inner())?))
        };
        let late = || RemoteError::Lost(format!("no answer within {} s", CONNECT_TIMEOUT.as_secs()));
        tokio::time::timeout(CONNECT_TIMEOUT, connect).await.map_err(|_| late())?
    }
}

impl Client {
    /// The server's state, now and later. Ends with the connection.
    pub(crate) async fn watch(&self) -> Result<BoxStream<'static, ServerState>, RemoteError> {
        let statuses = self.engine.clone().watch(proto::WatchRequest {}).await.map_err(refused)?.into_inner();
        let states = statuses.take_while(|status| std::future::ready(status.is_ok()));
        Ok(states.filter_map(|status| std::future::ready(status.ok().map(convert::state))).boxed())
    }

    /// Lets the server compute a sequence. Dropping the stream aborts it there.
    pub(crate) fn generate(&self, request: &SequenceRequest) -> impl Stream<Item = SequenceUpdate> + Send + use<> {
        let num_tokens = request.prompt_token_ids.len() + request.generated_token_ids.len();
        let checked = check_size(request.images.iter().map(|span| &span.image), num_tokens);
        let (sequence, mut engine) = (convert::sequence(request), self.engine.clone());
        async_stream::try_stream! {
            checked?;
            let mut batches = engine.generate(sequence).await.map_err(refused)?.into_inner();
            while let Some(batch) = batches.message().await.map_err(refused)? {
                let mut events = Vec::with_capacity(batch.events.len());
                for event in batch.events {
                    events.extend(convert::events(event)?);
                }
                yield events;
            }
            Err::<(), _>(RemoteError::Lost("the server ended a sequence without saying how".to_owned()))?;
        }
    }

    /// The inner error says what is wrong with the grammar, for the client.
    pub(crate) async fn compile(mut self, grammar: &Grammar) -> Result<Result<(), String>, RemoteError> {
        let grammar = Some(crate::worker::convert::grammar(grammar));
        let request = penstock_proto::CompileGrammarRequest { grammar };
        let answer = in_time(GRAMMAR_TIMEOUT, self.engine.compile_grammar(request)).await?;
        Ok(if answer.error.is_empty() { Ok(()) } else { Err(answer.error) })
    }

    /// What the workers make of each image. The inner error says what is wrong with one of them, for the client.
    pub(crate) async fn encode(
        mut self,
        images: Vec<Image>,
    ) -> Result<Result<Vec<EncodedImage>, ImageError>, RemoteError> {
        if let Err(error) = check_size(images.iter(), 0) {
            return Ok(Err(ImageError::Unusable(error.to_string())));
        }
        let images = images.iter().map(crate::worker::convert::image).collect();
        let request = penstock_proto::EncodeImagesRequest { images };
        let answer = in_time(IMAGE_TIMEOUT, self.engine.encode_images(request)).await?;
        match answer.error.is_empty() {
            true => Ok(Ok(answer.images.into_iter().map(crate::worker::convert::encoded_image).collect())),
            false => Ok(Err(crate::worker::convert::image_error(&answer))),
        }
    }
}

/// Refuses what does not fit in a message: no server would receive it.
fn check_size<'a>(images: impl Iterator<Item = &'a Image>, num_tokens: usize) -> Result<(), RemoteError> {
    let num_bytes = images.map(|image| image.data().len()).sum::<usize>() + num_tokens * MAX_TOKEN_BYTES;
    match num_bytes <= MAX_CONTENT_BYTES {
        true => Ok(()),
        false => Err(RemoteError::Refused(format!(
            "the images and tokens of the request have {num_bytes} bytes, at most {MAX_CONTENT_BYTES} are allowed; send smaller images"
        ))),
    }
}

async fn in_time<T>(
    timeout: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, RemoteError> {
    let late = || RemoteError::Refused(format!("the server did not answer within {} s", timeout.as_secs()));
    let answer = tokio::time::timeout(timeout, call).await.map_err(|_| late())?;
    Ok(answer.map_err(refused)?.into_inner())
}

fn refused(status: Status) -> RemoteError {
    RemoteError::of_status(&status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_that_does_not_fit_in_a_message_is_refused() {
        let image = Image::new(vec![0; 100]);
        let max_tokens = (MAX_CONTENT_BYTES - 100) / MAX_TOKEN_BYTES;
        assert_eq!(check_size([&image].into_iter(), max_tokens), Ok(()));
        let error = check_size([&image, &image].into_iter(), max_tokens).unwrap_err();
        assert!(
            matches!(&error, RemoteError::Refused(reason) if reason.contains("at most 66060288 are allowed")),
            "{error}"
        );
    }
}
