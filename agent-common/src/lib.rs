//! The binary interface (ABI) between the kernel programs (`agent-ebpf`) and the agent (`agent`).
//!
//! Nothing else lives here, except arithmetic that both sides must do alike (the call window, the
//! latency buckets, the retry budget, the pace of a program, the first bytes of requests, the limits), so that the code that runs in the
//! kernel is property-tested natively.
//!
//! Rules for every shared type: `repr(C)`, fixed-width integers, no `bool`, `enum`, `Option` or
//! implicit padding, [`bytemuck::Pod`], and a compile-time check of size and offsets. A number in
//! network byte order says so in its name (`port_be`). Any change to a layout or to the meaning of
//! a field changes [`ABI_VERSION`], which the agent compares with the one in the object it loads.
#![no_std]

pub mod adopt;
pub mod answer;
pub mod broker;
pub mod budget;
pub mod classify;
pub mod commands;
pub mod control;
pub mod event;
pub mod histogram;
pub mod http;
pub mod key;
pub mod lent;
pub mod limits;
pub mod method;
pub mod pace;
pub mod ramp;
pub mod reply;
pub mod request;
pub mod retry;
pub mod row;
pub mod spin;
pub mod stamp;
pub mod status;
pub mod syn;
pub mod tls;
pub mod tried;
pub mod unanswered;
pub mod verdict;
pub mod whole;
pub mod window;

pub use adopt::AdoptOffsets;
pub use answer::HeardAnswer;
pub use control::{Control, Counters, Mode, Offsets};
pub use event::{Event, EventKind};
pub use key::{DestinationKey, PolicyKey};
pub use lent::{Lent, LentKey};
pub use retry::{Retries, RetrySettings};
pub use row::{OTHER_ROW, Row, Settings};
pub use stamp::Stamp;
pub use status::Statuses;
pub use verdict::Verdict;
pub use window::CallWindow;

/// Version of everything in this crate; raised with any change of layout or meaning.
pub const ABI_VERSION: u32 = 12;

/// Nanoseconds in a millisecond.
pub const NANOS_PER_MS: u64 = 1_000_000;

/// Bytes of a process name, as the kernel keeps it (`TASK_COMM_LEN`, include/linux/sched.h).
pub const COMM_LEN: usize = 16;

/// Asserts the size of a shared type and the offsets of named fields at compile time.
macro_rules! layout {
    ($type:ty, size $size:literal $(, $field:ident at $offset:literal)* $(,)?) => {
        const _: () = {
            assert!(core::mem::size_of::<$type>() == $size);
            $(assert!(core::mem::offset_of!($type, $field) == $offset);)*
        };
    };
}
pub(crate) use layout;
