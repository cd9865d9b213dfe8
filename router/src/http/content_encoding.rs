//! Decodes bodies that clients send compressed. Other encodings are refused by name.
//!
//! INVARIANT: a body is decoded piece by piece as it is read, so the limit of bodies holds for what it decodes to.

use std::io::Write;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use flate2::write::{MultiGzDecoder, ZlibDecoder};
use http_body::Frame;

use super::dialect;
use crate::api::error::ApiError;

/// Compressed bytes that are decoded at a time. They become at most about a thousand times as many.
const PIECE_BYTES: usize = 1024;

/// Replaces a compressed body by what it decodes to.
pub(super) async fn decode(mut request: Request, next: Next) -> Response {
    let decoder = match decoder(request.headers()) {
        Ok(None) => return next.run(request).await,
        Ok(Some(decoder)) => decoder,
        Err(given) => {
            let message = format!("the content-encoding `{given}` is not supported, only gzip and deflate are");
            let error = ApiError::Malformed { status: StatusCode::UNSUPPORTED_MEDIA_TYPE, message, param: None };
            return dialect::error_response(request.uri().path(), error);
        }
    };
    request.headers_mut().remove(header::CONTENT_ENCODING);
    request.headers_mut().remove(header::CONTENT_LENGTH);
    let decoded = |body| Body::new(DecodedBody { body, encoded: Bytes::new(), decoder: Some(decoder) });
    next.run(request.map(decoded)).await
}

/// The decoder of a body with these headers; `None` if it is not encoded. The error is the encoding that was given.
fn decoder(headers: &HeaderMap) -> Result<Option<Decoder>, String> {
    let given: Vec<_> = headers.get_all(header::CONTENT_ENCODING).iter().map(|value| value.as_bytes()).collect();
    let given = String::from_utf8_lossy(&given.join(&b","[..])).trim().to_ascii_lowercase();
    match given.as_str() {
        "" | "identity" => Ok(None),
        "gzip" | "x-gzip" => Ok(Some(Decoder::Gzip(MultiGzDecoder::new(Vec::new())))),
        "deflate" => Ok(Some(Decoder::Deflate(ZlibDecoder::new(Vec::new())))),
        _ => Err(given),
    }
}

enum Decoder {
    Gzip(MultiGzDecoder<Vec<u8>>),
    Deflate(ZlibDecoder<Vec<u8>>),
}

impl Decoder {
    /// What the next piece decodes to.
    fn decode(&mut self, piece: &[u8]) -> std::io::Result<Bytes> {
        let decoded = match self {
            Self::Gzip(decoder) => decoder.write_all(piece).map(|()| std::mem::take(decoder.get_mut())),
            Self::Deflate(decoder) => decoder.write_all(piece).map(|()| std::mem::take(decoder.get_mut())),
        };
        decoded.map(Bytes::from)
    }

    /// The rest. Fails if the encoded body is incomplete.
    fn finish(self) -> std::io::Result<Bytes> {
        match self {
            Self::Gzip(decoder) => decoder.finish(),
            Self::Deflate(decoder) => decoder.finish(),
        }
        .map(Bytes::from)
    }
}

struct DecodedBody {
    body: Body,
    /// What has been read but not decoded.
    encoded: Bytes,
    /// `None` after the end.
    decoder: Option<Decoder>,
}

impl http_body::Body for DecodedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let broken = |error: std::io::Error| axum::Error::new(format!("the body cannot be decoded: {error}"));
        loop {
            let this = &mut *self;
            let Some(decoder) = &mut this.decoder else { return Poll::Ready(None) };
            let decoded = if this.encoded.is_empty() {
                match ready!(Pin::new(&mut this.body).poll_frame(context)) {
                    Some(Ok(frame)) => {
                        this.encoded = frame.into_data().unwrap_or_default();
                        continue;
                    }
                    Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                    None => this.decoder.take().map_or(Ok(Bytes::new()), Decoder::finish),
                }
            } else {
                let piece = this.encoded.split_to(PIECE_BYTES.min(this.encoded.len()));
                decoder.decode(&piece)
            };
            match decoded {
                Ok(bytes) if bytes.is_empty() => {}
                Ok(bytes) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                Err(error) => {
                    this.decoder = None;
                    return Poll::Ready(Some(Err(broken(error))));
                }
            }
        }
    }
}
