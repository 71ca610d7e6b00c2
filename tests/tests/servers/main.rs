//! Real servers and their own clients: what they say when they are well, and when they are not.

mod long;
mod mariadb;
mod nginx;
mod outages;
mod postgres;
mod redis;
mod ssh;
mod syslog;
mod tls;
