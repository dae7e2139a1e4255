"""Reading the weights of a job that trains, without a rank; and publishing those of any trainer."""
