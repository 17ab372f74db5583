"""What users test their own resources, tools and runs with."""
