"""Make new recipes: from a few answers, sized by the estimate, or from those that come along."""
