//! A connection that sends a few small buffers as one.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// PERF: an event is three buffers, because hyper writes the size of a chunk before it and a line end after it. Copying a few hundred bytes
/// costs less than what the kernel does for each buffer (docs/adr/streams-and-connections.md).
const MAX_JOINED_BYTES: usize = 1024;

/// A stream that joins the buffers of a vectored write if they are small.
pub(super) struct JoinedWrites<S>(pub(super) S);

impl<S: AsyncWrite + Unpin> AsyncWrite for JoinedWrites<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, buffer)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let stream = Pin::new(&mut self.0);
        let mut joined = [0; MAX_JOINED_BYTES];
        let mut num_bytes = 0;
        for buffer in buffers {
            let Some(rest) = joined.get_mut(num_bytes..num_bytes + buffer.len()) else {
                return stream.poll_write_vectored(context, buffers);
            };
            rest.copy_from_slice(buffer);
            num_bytes += buffer.len();
        }
        stream.poll_write(context, &joined[..num_bytes])
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for JoinedWrites<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn buffers_arrive_in_order_whether_they_are_joined_or_not() {
        let (writer, mut reader) = UnixStream::pair().unwrap();
        let mut writer = JoinedWrites(writer);
        let (mut expected, mut sent) = (Vec::new(), 0);
        for sizes in [&[1, 2, 3][..], &[MAX_JOINED_BYTES, 0], &[MAX_JOINED_BYTES, 1], &[5, 2 * MAX_JOINED_BYTES, 7]] {
            let buffers: Vec<Vec<u8>> = sizes.iter().zip(b'a'..).map(|(&size, byte)| vec![byte; size]).collect();
            let slices: Vec<_> = buffers.iter().map(|buffer| IoSlice::new(buffer)).collect();
            sent += writer.write_vectored(&slices).await.unwrap();
            expected.extend(buffers.concat());
        }
        assert_eq!(sent, expected.len());
        drop(writer);
        let mut received = Vec::new();
        reader.read_to_end(&mut received).await.unwrap();
        assert!(received == expected);
    }
}
