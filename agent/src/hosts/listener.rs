//! Hears what programs are told about names: reads the ring into which the kernel copies DNS answers.
//!
//! A thread of its own at normal priority, so that nobody who sends answers can keep the event thread
//! from its work. What comes faster than it can be taken in is left out.

use std::time::Duration;

use agent_common::HeardAnswer;
use anyhow::{Context as _, Result};
use aya::maps::{MapData, RingBuf};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::mpsc;

use super::answer::{Answer, decode};

/// Answers that may wait for the select loop.
const QUEUE: usize = 1024;
/// How often the thread looks whether it is still wanted.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// What a program was told.
#[derive(Debug)]
pub struct Heard {
    /// Cookie of the network namespace.
    pub netns: u64,
    /// What.
    pub answer: Answer,
}

/// Starts the thread; it ends when the receiver is dropped.
///
/// # Errors
/// When the system gives no thread.
pub fn start(ring: RingBuf<MapData>) -> Result<mpsc::Receiver<Heard>> {
    let (sender, heard) = mpsc::channel(QUEUE);
    std::thread::Builder::new()
        .name("backstop-names".into())
        .spawn(move || run(ring, &sender))
        .context("start the thread that hears names")?;
    Ok(heard)
}

fn run(mut ring: RingBuf<MapData>, sender: &mpsc::Sender<Heard>) {
    let timeout = Timespec {
        tv_sec: LONGEST_SLEEP.as_secs() as i64,
        tv_nsec: 0,
    };
    while !sender.is_closed() {
        while let Some(record) = ring.next() {
            if let Some(heard) = taken(&record) {
                // With a full queue this one is left out.
                let _ = sender.try_send(heard);
            }
        }
        let fd = {
            use std::os::fd::{AsRawFd as _, BorrowedFd};
            // SAFETY: the ring keeps its descriptor open as long as it lives.
            unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) }
        };
        // Interrupted or failed: the loop looks anyway.
        let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout));
    }
}

/// What a record says; `None` for one of another size, and for a message that is no answer.
fn taken(record: &[u8]) -> Option<Heard> {
    if record.len() != size_of::<HeardAnswer>() {
        return None;
    }
    let raw: HeardAnswer = bytemuck::pod_read_unaligned(record);
    let message = raw.message.get(..raw.length as usize)?;
    Some(Heard {
        netns: raw.netns_cookie,
        answer: decode(message)?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_record_is_taken_or_left(record: Vec<u8>) {
            prop_assert!(taken(&record).is_none());
        }

        #[test]
        fn any_length_is_taken_or_left(length: u32, byte: u8) {
            let mut raw: HeardAnswer = bytemuck::Zeroable::zeroed();
            raw.length = length;
            raw.message.fill(byte);
            prop_assert!(taken(bytemuck::bytes_of(&raw)).is_none());
        }
    }
}
