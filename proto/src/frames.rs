//! The stream of steps over a unix socket: what the comment on `Steps` in worker.proto specifies.

use std::ffi::OsString;
use std::io::{Error, ErrorKind};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use prost::Message;
use prost::bytes::{Buf, BufMut, BytesMut};
use tokio_util::codec::{Decoder, Encoder};
use tonic::{Code, Status};

/// Bytes of the length in front of a frame.
const LENGTH_BYTES: usize = 4;

/// The socket for streams of steps of the worker that listens on this one.
pub fn steps_socket(socket: &Path) -> PathBuf {
    let mut path = OsString::from(socket);
    path.push(".steps");
    path.into()
}

/// Frames of one direction: messages, or the status with which the stream fails.
pub struct Frames<M>(PhantomData<fn() -> M>);

impl<M> Default for Frames<M> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<M: Message + Default> Decoder for Frames<M> {
    type Item = Result<M, Status>;
    type Error = Error;

    fn decode(&mut self, received: &mut BytesMut) -> Result<Option<Self::Item>, Error> {
        let Some(&length) = received.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = u32::from_le_bytes(length) as usize;
        if received.len() - LENGTH_BYTES < length {
            return Ok(None);
        }
        received.advance(LENGTH_BYTES);
        let mut frame = received.split_to(length);
        if frame.is_empty() {
            return Err(Error::new(ErrorKind::InvalidData, "a frame without a status code"));
        }
        match Code::from(i32::from(frame.get_u8())) {
            Code::Ok => M::decode(frame).map(|message| Some(Ok(message))).map_err(Error::other),
            code => Ok(Some(Err(Status::new(code, String::from_utf8_lossy(&frame))))),
        }
    }
}

impl<M: Message> Encoder<Result<M, Status>> for Frames<M> {
    type Error = Error;

    fn encode(&mut self, item: Result<M, Status>, target: &mut BytesMut) -> Result<(), Error> {
        let (code, num_bytes) = match &item {
            Ok(message) => (Code::Ok, message.encoded_len()),
            Err(status) => (status.code(), status.message().len()),
        };
        let length = u32::try_from(num_bytes + 1).map_err(|_| Error::other("a message is larger than 4 GiB"))?;
        target.reserve(LENGTH_BYTES + length as usize);
        target.put_u32_le(length);
        target.put_u8(code as u8);
        match item {
            Ok(message) => message.encode(target).map_err(Error::other)?,
            Err(status) => target.put_slice(status.message().as_bytes()),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Plan, StepResult};

    #[test]
    fn frames_arrive_as_sent_however_they_are_cut() {
        let plans =
            [Plan { step: 1, ..Default::default() }, Plan::default(), Plan { step: u64::MAX, ..Default::default() }];
        let mut sent = BytesMut::new();
        for plan in &plans {
            Frames::default().encode(Ok(plan.clone()), &mut sent).unwrap();
        }
        Frames::<Plan>::default().encode(Err(Status::aborted("ünd")), &mut sent).unwrap();
        for piece in [1, 2, 5, sent.len()] {
            let (mut frames, mut received, mut found) = (Frames::<Plan>::default(), BytesMut::new(), Vec::new());
            for bytes in sent.chunks(piece) {
                received.extend_from_slice(bytes);
                while let Some(frame) = frames.decode(&mut received).unwrap() {
                    found.push(frame);
                }
            }
            assert!(received.is_empty());
            let failure = found.pop().unwrap().unwrap_err();
            assert_eq!((failure.code(), failure.message()), (Code::Aborted, "ünd"));
            assert_eq!(found.into_iter().map(Result::unwrap).collect::<Vec<_>>(), plans);
        }
    }

    #[test]
    fn broken_frames_are_errors() {
        for bytes in [&[0, 0, 0, 0][..], &[2, 0, 0, 0, 0, 0xff]] {
            assert!(Frames::<StepResult>::default().decode(&mut BytesMut::from(bytes)).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn the_socket_of_steps_is_beside_the_worker_s() {
        assert_eq!(steps_socket(Path::new("/a/b.c")), Path::new("/a/b.c.steps"));
    }
}
