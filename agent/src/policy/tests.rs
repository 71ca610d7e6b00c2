mod bad;
mod changes;
mod documentation;
mod files;
mod properties;
mod resolution;
mod spelling;
mod writing;
