//! Programs whose retries are known: truthful HOW HOST PORT SECONDS RATE RETRIES, as clients/truth.py.
//!
//! HOW is `threads` (blocking workers) or `tokio` (tasks that hop between the threads of its runtime).

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const WORKERS: u64 = 20;

struct Plan {
    to: SocketAddr,
    end: Instant,
    rate: f64,
    most: u32,
    calls: AtomicU64,
    retries: AtomicU64,
}

impl Plan {
    fn request(&self) -> String {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        format!("GET /{number} HTTP/1.1\r\nConnection: close\r\n\r\n")
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }

    /// A random pause between two calls of a worker.
    fn pause(&self, random: &mut u64) -> Duration {
        // xorshift64*, after Vigna.
        *random ^= *random >> 12;
        *random ^= *random << 25;
        *random ^= *random >> 27;
        let share =
            (random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1_u64 << 53) as f64;
        Duration::from_secs_f64(-(1.0 - share).ln() * WORKERS as f64 / self.rate)
    }

    fn count_retry(&self, attempt: u32) {
        if attempt > 0 {
            self.retries.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn is_good(answer: &[u8]) -> bool {
    answer.starts_with(b"HTTP/1.1 2")
}

fn ask(plan: &Plan, request: &str) -> bool {
    let mut answer = Vec::new();
    let mut asked = || {
        let mut stream = TcpStream::connect(plan.to)?;
        stream.write_all(request.as_bytes())?;
        stream.read_to_end(&mut answer)
    };
    asked().is_ok_and(|_| is_good(&answer))
}

async fn ask_async(plan: &Plan, request: &str) -> bool {
    let mut answer = Vec::new();
    let asked = async {
        let mut stream = tokio::net::TcpStream::connect(plan.to).await?;
        stream.write_all(request.as_bytes()).await?;
        stream.read_to_end(&mut answer).await
    };
    asked.await.is_ok_and(|_| is_good(&answer))
}

fn work(plan: &Plan, mut random: u64) {
    while !plan.is_over() {
        let request = plan.request();
        for attempt in 0..=plan.most {
            plan.count_retry(attempt);
            if ask(plan, &request) {
                break;
            }
        }
        std::thread::sleep(plan.pause(&mut random));
    }
}

async fn work_async(plan: Arc<Plan>, mut random: u64) {
    while !plan.is_over() {
        let request = plan.request();
        for attempt in 0..=plan.most {
            plan.count_retry(attempt);
            if ask_async(&plan, &request).await {
                break;
            }
        }
        tokio::time::sleep(plan.pause(&mut random)).await;
    }
}

#[expect(clippy::print_stdout, reason = "what it has done is its output")]
fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [how, host, port, seconds, rate, most] = &words[..] else {
        panic!("truthful HOW HOST PORT SECONDS RATE RETRIES");
    };
    let seconds = seconds.parse().expect("seconds");
    let plan = Arc::new(Plan {
        to: format!("{host}:{port}").parse().expect("an address"),
        end: Instant::now() + Duration::from_secs_f64(seconds),
        rate: rate.parse().expect("calls a second"),
        most: most.parse().expect("retries"),
        calls: AtomicU64::new(0),
        retries: AtomicU64::new(0),
    });
    let seeds = (1..=WORKERS).map(|worker| worker.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    if how == "tokio" {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let tasks: Vec<_> = seeds
                .map(|seed| tokio::spawn(work_async(Arc::clone(&plan), seed)))
                .collect();
            for task in tasks {
                task.await.expect("a task");
            }
        });
    } else {
        std::thread::scope(|scope| {
            for seed in seeds {
                let plan = &plan;
                scope.spawn(move || work(plan, seed));
            }
        });
    }
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        "{{\"calls\":{},\"retries\":{}}}",
        count(&plan.calls),
        count(&plan.retries)
    );
}
