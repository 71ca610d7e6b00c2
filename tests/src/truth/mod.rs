//! Labelled truth: what Backstop takes for a retry of programs whose retries are known.
//!
//! A server gives every attempt its true label (it has seen the operation before, or not), reads from the
//! stamp of the client's socket what Backstop took it for, and compares. The program's own count or log of
//! its retries stands beside it.

pub mod chain;
pub mod label;
pub mod programs;
pub mod proxies;
pub mod server;
pub mod storm;

use std::{
    net::SocketAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use serde_json::Value;

use self::{
    label::Labels,
    programs::Caller,
    server::{Labelling, Seen},
};
use crate::{agent::Agent, cgroup::TestCgroup, net::TestNet, process::Program, wait};

/// Where the server listens first; the next two ports are its own too.
pub const TO: SocketAddr = TestNet::server4(8080);
const OTHERS: [SocketAddr; 2] = [TestNet::server4(8081), TestNet::server4(8082)];
/// For a program to end beyond the time that it is given.
const MORE: Duration = Duration::from_secs(120);
const SOON: Duration = Duration::from_secs(30);
/// The built-in limit and budget, without a breaker that would be quicker.
const ENFORCE: &str = "[defaults]\nbreaker = \"off\"\n";
/// The same, where only is counted what would be refused: else a program's retries would never be seen.
const OBSERVE: &str = "mode = \"observe\"\n[defaults]\nbreaker = \"off\"\n";

/// How a program calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One call after the other.
    Sequential,
    /// Threads, of which each makes one call after the other.
    ThreadPerRequest,
    /// Many calls on one thread.
    EventLoop,
    /// Calls hop between the threads of Go's runtime.
    Go,
    /// The same, of tokio's.
    Tokio,
}

impl Kind {
    /// Its name in the table.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sequential => "sequential",
            Self::ThreadPerRequest => "threads",
            Self::EventLoop => "event loop",
            Self::Go => "Go",
            Self::Tokio => "tokio",
        }
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    /// Who calls.
    pub caller: &'static Caller,
    /// So many of a hundred requests fail.
    pub percent: u64,
    /// So many calls a second are wanted.
    pub rate: u32,
    /// For so long.
    pub seconds: u64,
}

/// What a program says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Own {
    /// Operations.
    pub calls: u64,
    /// Retries by its own log or count.
    pub retries: u64,
}

/// What came out.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// What was measured.
    pub cell: Cell,
    /// What the program says.
    pub own: Own,
    /// What the server has seen.
    pub seen: Seen,
    /// Retries as Backstop has counted them, refused ones too, whatever they are in truth.
    pub taken: u64,
    /// Refused by the limit (or, of a program that retries, what would have been).
    pub by_limit: u64,
    /// The same by the budget.
    pub by_budget: u64,
}

impl Figures {
    /// Fresh calls that were taken for retries, in the end.
    pub fn fresh_taken(&self) -> u64 {
        self.seen.fresh_taken + self.fresh_refused()
    }

    /// Fresh calls that `connect()` took for retries.
    pub fn fresh_by_connect(&self) -> u64 {
        self.seen.fresh_by_connect + self.fresh_refused()
    }

    /// Fresh calls that were refused as retries: they reach no server.
    fn fresh_refused(&self) -> u64 {
        if self.cell.caller.retries == 0 {
            self.by_limit + self.by_budget
        } else {
            0
        }
    }

    /// Its share of all operations.
    pub fn fresh_share(&self) -> f64 {
        self.fresh_taken() as f64 / self.own.calls.max(1) as f64
    }

    /// Share of the retries that were seen, of those that dial. `None` where there were none.
    pub fn recall(&self) -> Option<f64> {
        let Seen {
            retries,
            retries_taken,
            ..
        } = self.seen;
        (retries > 0).then(|| retries_taken as f64 / retries as f64)
    }
}

/// Namespaces, agent and server of one measurement.
pub struct Scene {
    /// The namespaces.
    pub net: TestNet,
    /// The program's control group.
    pub group: TestCgroup,
    /// The agent that watches it.
    pub agent: Agent,
    /// The server that fails.
    pub server: Labelling,
}

impl Scene {
    /// With this configuration and so many failures of a hundred.
    pub fn new(config: &str, percent: u64) -> Self {
        // Loading programs takes all that a processor can do: many at once would be too late.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let (net, group) = (TestNet::new(), TestCgroup::new("truth"));
        let agent = Agent::start(&group, config);
        let labels = Labels::new(&agent, &net.client);
        let addresses = [TO, OTHERS[0], OTHERS[1]];
        let server = Labelling::start(&net.server, &addresses, percent, Some(labels));
        Self {
            net,
            group,
            agent,
            server,
        }
    }

    /// A program of the client's, with time for that many seconds.
    pub fn client(&self, program: Program, seconds: u64) -> Program {
        program
            .in_cgroup(&self.group)
            .in_netns(&self.net.client)
            .within(Duration::from_secs(seconds) + MORE)
    }

    /// Its rows, once nothing is under way.
    pub fn rows(&self) -> Vec<Value> {
        wait::until("all connections to end", SOON, || {
            let mut status = self.agent.status();
            let rows = status["destinations"].as_array_mut().expect("rows");
            rows.iter()
                .all(|row| row["in_flight"] == 0)
                .then(|| std::mem::take(rows))
        })
    }
}

/// Measures one.
pub fn measure(cell: Cell) -> Figures {
    let is_retrying = cell.caller.retries > 0;
    let scene = Scene::new(if is_retrying { OBSERVE } else { ENFORCE }, cell.percent);
    let own = (cell.caller.run)(&scene, &cell);
    let rows = scene.rows();
    let sum = |keys: [&str; 2]| -> u64 {
        let numbers = rows.iter().map(|row| &row[keys[0]][keys[1]]);
        numbers
            .map(|number| number.as_u64().expect("a count"))
            .sum()
    };
    let refused = if is_retrying {
        "would_reject"
    } else {
        "rejected"
    };
    let (by_limit, by_budget) = (
        sum([refused, "retry_limit"]),
        sum([refused, "retry_budget"]),
    );
    let mut taken = sum(["retry", "retries"]);
    if !is_retrying {
        taken += by_limit + by_budget;
    }
    Figures {
        cell,
        own,
        seen: scene.server.seen(),
        taken,
        by_limit,
        by_budget,
    }
}
