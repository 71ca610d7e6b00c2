mod bad;
mod changes;
mod files;
mod properties;
mod resolution;
mod spelling;
