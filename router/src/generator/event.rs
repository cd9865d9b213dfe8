//! The channel from an engine to the stream of one sequence.
//!
//! A step has events for many sequences at once. If the engine's thread woke each reader by itself, it would take a lock of their runtime for each
//! of them, and often wake a thread. So it collects their wakers, and a task of that runtime wakes all readers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::sync::mpsc::{self, UnboundedSender};

use crate::sequence::SequenceEvent;

/// A channel without a bound.
pub fn event_channel() -> (EventSender, EventReceiver) {
    let channel = Arc::default();
    (EventSender { channel: Arc::clone(&channel), unwoken: None }, EventReceiver(channel))
}

/// The engine's side. Dropping it ends the stream.
pub struct EventSender {
    channel: Arc<Mutex<Channel>>,
    /// The reader, if `push` has sent it an event and nothing has woken it since.
    unwoken: Option<Waker>,
}

/// The stream's side.
pub struct EventReceiver(Arc<Mutex<Channel>>);

#[derive(Default)]
struct Channel {
    events: VecDeque<SequenceEvent>,
    /// The waker of the reader that waits for the next event.
    reader: Option<Waker>,
    /// One of the sides is gone.
    is_closed: bool,
}

impl EventSender {
    /// Sends an event. It is dropped if the stream has ended.
    pub fn send(&self, event: SequenceEvent) {
        if let Some(reader) = self.enqueue(event) {
            reader.wake();
        }
    }

    /// Sends an event, and leaves it to the caller to wake the reader (`take_reader`).
    pub(crate) fn push(&mut self, event: SequenceEvent) {
        let reader = self.enqueue(event);
        self.unwoken = reader.or(self.unwoken.take());
    }

    /// The reader to wake after `push`, if it waits.
    pub(crate) fn take_reader(&mut self) -> Option<Waker> {
        self.unwoken.take()
    }

    fn enqueue(&self, event: SequenceEvent) -> Option<Waker> {
        let mut channel = lock(&self.channel);
        if channel.is_closed {
            return None;
        }
        channel.events.push_back(event);
        channel.reader.take()
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        let reader = {
            let mut channel = lock(&self.channel);
            channel.is_closed = true;
            channel.reader.take()
        };
        self.unwoken.take().into_iter().chain(reader).for_each(Waker::wake);
    }
}

impl EventReceiver {
    /// The next event. `None` after the last one, when the sender was dropped.
    pub(super) fn poll_recv(&self, context: &mut Context<'_>) -> Poll<Option<SequenceEvent>> {
        let mut channel = lock(&self.0);
        match channel.events.pop_front() {
            Some(event) => Poll::Ready(Some(event)),
            None if channel.is_closed => Poll::Ready(None),
            None => {
                match &mut channel.reader {
                    Some(reader) => reader.clone_from(context.waker()),
                    reader => *reader = Some(context.waker().clone()),
                }
                Poll::Pending
            }
        }
    }

    /// Drops the events that were not read, and those that are still sent.
    pub(super) fn close(&self) {
        let mut channel = lock(&self.0);
        channel.is_closed = true;
        channel.events = VecDeque::new();
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        self.close();
    }
}

fn lock(channel: &Mutex<Channel>) -> MutexGuard<'_, Channel> {
    // Consistent between any two statements.
    channel.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes readers from the runtime that it was made in. Clones share its task, which ends with the last one.
#[derive(Clone)]
pub(crate) struct Alarm(UnboundedSender<Vec<Waker>>);

impl Alarm {
    pub(crate) fn new() -> Self {
        let (sender, mut receiver) = mpsc::unbounded_channel::<Vec<Waker>>();
        tokio::spawn(async move {
            while let Some(readers) = receiver.recv().await {
                readers.into_iter().for_each(Waker::wake);
            }
        });
        Self(sender)
    }

    pub(crate) fn wake(&self, readers: Vec<Waker>) {
        if readers.len() > 1 {
            let Err(refused) = self.0.send(readers) else { return };
            // The runtime has ended.
            return refused.0.into_iter().for_each(Waker::wake);
        }
        readers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;

    use super::*;
    use crate::generator::SequenceStream;
    use crate::sequence::FinishReason;

    fn started(num_cached_tokens: usize) -> SequenceEvent {
        SequenceEvent::Started { num_cached_tokens }
    }

    #[tokio::test]
    async fn events_arrive_in_order_and_a_stream_without_its_sender_ends() {
        let (sender, receiver) = event_channel();
        let mut stream = SequenceStream::new(receiver, || {});
        let reader = tokio::spawn(async move { (stream.next().await, stream.next().await, stream.next().await) });
        tokio::task::yield_now().await;
        sender.send(started(1));
        sender.send(started(2));
        drop(sender);
        assert_eq!(reader.await.unwrap(), (Some(started(1)), Some(started(2)), None));
    }

    #[tokio::test]
    async fn an_alarm_wakes_every_reader() {
        let channels: Vec<_> = (0..100).map(|_| event_channel()).collect();
        let (mut senders, receivers): (Vec<_>, Vec<_>) = channels.into_iter().unzip();
        let streams = receivers.into_iter().map(|receiver| SequenceStream::new(receiver, || {}));
        let readers: Vec<_> = streams.map(|mut stream| tokio::spawn(async move { stream.next().await })).collect();
        tokio::task::yield_now().await;
        let alarm = Alarm::new();
        let engine = std::thread::spawn(move || {
            alarm.wake(
                senders
                    .iter_mut()
                    .filter_map(|sender| {
                        sender.push(started(7));
                        sender.take_reader()
                    })
                    .collect(),
            );
            senders
        });
        for reader in readers {
            assert_eq!(reader.await.unwrap(), Some(started(7)));
        }
        engine.join().unwrap();
    }

    #[test]
    fn what_is_sent_after_the_end_or_without_a_reader_is_dropped() {
        let (sender, receiver) = event_channel();
        sender.send(SequenceEvent::Finished(FinishReason::Length));
        receiver.close();
        sender.send(started(1));
        assert!(lock(&sender.channel).events.is_empty());
        drop(receiver);
        sender.send(started(2));
        assert!(lock(&sender.channel).events.is_empty());
    }
}
