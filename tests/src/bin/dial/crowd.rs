//! Many threads that connect and close as fast as they can.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, poll};
use serde_json::{Value, json};

use crate::socket::{EINPROGRESS, Plan, Socket};

/// For so long: how often each errno came, and how many connections were there at most at once, as
/// the threads themselves have counted (after connect() and before close()).
pub fn run(threads: usize, longest: Duration, to: SocketAddr, plan: &Plan) -> Value {
    let (open, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let errnos = Mutex::new(BTreeMap::<i32, u64>::new());
    let until = Instant::now() + longest;
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut own = BTreeMap::<i32, u64>::new();
                while Instant::now() < until {
                    let socket = Socket::new(to, plan);
                    socket.reset_at_close();
                    let mut errno = socket.connect(to);
                    if errno == EINPROGRESS {
                        let mut fds = [PollFd::new(&socket, PollFlags::OUT)];
                        poll(&mut fds, None).expect("poll");
                        errno = socket.error();
                    }
                    *own.entry(errno).or_default() += 1;
                    if errno == 0 {
                        let now = open.fetch_add(1, Ordering::SeqCst) + 1;
                        most.fetch_max(now, Ordering::SeqCst);
                        std::thread::yield_now();
                        open.fetch_sub(1, Ordering::SeqCst);
                    } else {
                        // A refusal takes no time: let others get on.
                        std::thread::yield_now();
                    }
                }
                let mut all = errnos.lock().expect("no thread panics");
                for (errno, count) in own {
                    *all.entry(errno).or_default() += count;
                }
            });
        }
    });
    let errnos: BTreeMap<String, u64> = errnos
        .into_inner()
        .expect("no thread panics")
        .into_iter()
        .map(|(errno, count)| (errno.to_string(), count))
        .collect();
    json!({"errnos": errnos, "most": most.into_inner()})
}
