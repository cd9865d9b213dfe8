//! What one rendering may cost. A request that needs more is refused.

use std::time::Duration;

/// Instructions of minijinja. Conversations of 3,000 messages need less.
pub(super) const MAX_OPERATIONS: u64 = 5_000_000;

/// Wall-clock time of a rendering.
pub(super) const RENDER_DEADLINE: Duration = Duration::from_secs(5);

/// Wall-clock time that a renderer process may take to start, and to compile and try out its template.
pub(super) const START_DEADLINE: Duration = Duration::from_secs(10);

/// Memory that a renderer process may map in addition to what it maps at its start.
pub(super) const MAX_MEMORY_BYTES: u64 = 512 << 20;

/// Length of a prompt.
pub(super) const MAX_PROMPT_BYTES: usize = 32 << 20;
