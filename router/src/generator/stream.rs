//! The events of a sequence on their way to its request.

use std::pin::Pin;
use std::task::{Context, Poll};

use super::event::{EventReceiver, event_channel};
use crate::sequence::{SequenceEvent, SequenceFailure};
use futures::Stream;

type Observer = Box<dyn FnMut(&SequenceEvent) + Send>;

/// The events of one sequence, in order. Ends after the terminal event. Dropping the stream before aborts the sequence.
pub struct SequenceStream {
    // Bounded in effect: a sequence has at most one event per prompt chunk and generated token, and two more.
    events: EventReceiver,
    abort: Option<Box<dyn FnOnce() + Send>>,
    /// Sees every event; dropped with the terminal one.
    observer: Option<Observer>,
}

impl SequenceStream {
    /// `abort` runs when the stream is dropped before its terminal event was read.
    pub fn new(events: EventReceiver, abort: impl FnOnce() + Send + 'static) -> Self {
        Self { events, abort: Some(Box::new(abort)), observer: None }
    }

    /// A stream whose only event is this failure.
    pub(crate) fn failed(failure: SequenceFailure) -> Self {
        let (events, receiver) = event_channel();
        events.send(SequenceEvent::Failed(failure));
        Self::new(receiver, || {})
    }

    /// Shows every event to `observer`, which is dropped after the terminal one, or with the stream.
    pub(crate) fn observed(mut self, observer: impl FnMut(&SequenceEvent) + Send + 'static) -> Self {
        self.observer = Some(Box::new(observer));
        self
    }
}

impl Stream for SequenceStream {
    type Item = SequenceEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<SequenceEvent>> {
        let event = self.events.poll_recv(context);
        if let (Poll::Ready(Some(event)), Some(observer)) = (&event, &mut self.observer) {
            observer(event);
        }
        if let Poll::Ready(Some(SequenceEvent::Finished(_) | SequenceEvent::Failed(_))) = event {
            (self.abort, self.observer) = (None, None);
            self.events.close();
        }
        event
    }
}

impl Drop for SequenceStream {
    fn drop(&mut self) {
        if let Some(abort) = self.abort.take() {
            abort();
        }
    }
}
