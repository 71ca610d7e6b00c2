//! What policies say, for rows that exist and for those to come.

use std::sync::atomic::Ordering;

use agent_common::{RetrySettings, Settings, Statuses};

use super::{Table, half};
use crate::core::RowId;

impl Table {
    /// Gives a row the settings of its policy. `probe_limit` is the verdict's and stays.
    pub fn set_settings(&self, id: RowId, settings: Settings) {
        let Some(row) = self.rows.get(id.index) else {
            return;
        };
        // SAFETY: within the mapping.
        unsafe {
            if half(&raw mut (*row).incarnation).load(Ordering::Acquire) != id.incarnation {
                return;
            }
            let to = &raw mut (*row).settings;
            half(&raw mut (*to).connect_timeout_ms)
                .store(settings.connect_timeout_ms, Ordering::Release);
            half(&raw mut (*to).syn_timeout_ticks)
                .store(settings.syn_timeout_ticks, Ordering::Release);
            half(&raw mut (*to).gave_up_ms).store(settings.gave_up_ms, Ordering::Release);
            half(&raw mut (*to).slow_call_us).store(settings.slow_call_us, Ordering::Release);
            half(&raw mut (*to).fail_status).store(settings.fail_status, Ordering::Release);
            half(&raw mut (*to).exchange_gave_up_ms)
                .store(settings.exchange_gave_up_ms, Ordering::Release);
            half(&raw mut (*to).keepalive_s).store(settings.keepalive_s, Ordering::Release);
            half(&raw mut (*to).connections_most)
                .store(settings.connections_most, Ordering::Release);
            half(&raw mut (*to).pending_most).store(settings.pending_most, Ordering::Release);
            half(&raw mut (*to).connects_per_second)
                .store(settings.connects_per_second, Ordering::Release);
            half(&raw mut (*to).limit_errno).store(settings.limit_errno, Ordering::Release);
            half(&raw mut (*to).policy).store(settings.policy, Ordering::Release);
            half(&raw mut (*to).flags).store(settings.flags, Ordering::Release);
        }
    }

    /// Sets when a program that closes before an answer counts as having given up, ms: for a
    /// connect, and for an exchange.
    pub fn set_gave_up(&self, id: RowId, ms: u32, exchange_ms: u32) {
        let Some(row) = self.rows.get(id.index) else {
            return;
        };
        // SAFETY: within the mapping.
        unsafe {
            half(&raw mut (*row).settings.gave_up_ms).store(ms, Ordering::Release);
            half(&raw mut (*row).settings.exchange_gave_up_ms)
                .store(exchange_ms, Ordering::Release);
        }
    }

    /// Settings of a policy, for rows that the kernel creates.
    pub fn set_policy(&self, index: u32, settings: Settings) {
        self.policies.write(index, settings);
    }

    /// What a policy says about retries.
    pub fn set_retry_policy(&self, index: u32, settings: RetrySettings) {
        self.retry_policies.write(index, settings);
    }

    /// The statuses that a policy takes for failures, where it lists single ones.
    pub fn set_statuses(&self, index: u32, statuses: Statuses) {
        self.statuses.write(index, statuses);
    }
}
