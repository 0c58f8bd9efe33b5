r"""tide: test-time inference under drift, by evidence. A method of this project.

One forward pass over each image and its mirror image, one update of the weights, and the prediction of that pass. Let
p_i be the mean probability of the two views of image i, and n the images of the batch.

1. **Stream statistics** (`methods/statistics.py`). Each BatchNorm normalizes with running statistics of the stream. A
   **shift detector** (`shift_detector.py`) compares the mean description of the last images with that of the domain and
   gives the probability d that a new domain has begun; memories, also Adam's, are multiplied by 1 - d, and half of the
   learned change is undone: theta <- theta + d/2 (theta_source - theta).
2. **Source mixing** (`source_mixing.py`). Each BatchNorm uses the statistics of a mixture of stream and training data
   in the proportion a : 1 - a. With the channel means and mean squares t_i of image i in units of the source, their
   mean t over the n images of the stream, the mean squared distance V of the t_i to t, and D = |t - t_source|^2,

       a  =  D / (D + 4 V / (n - 1) + 0.02).
3. **Domain clusters** (`domain_clusters.py`). Where the descriptions of the images vary more than those of one domain,
   k-means finds C = 8 clusters, and each BatchNorm keeps statistics for each of them; else C = 1.
4. **Label shift** (`label_shift.py`). The share r of the unevenness of the predictions that is due to the network,

       r  =  min(1, 2 (1 - kappa) / T)^2 / (1 + (g / 1.8)^16),

   with Cohen's kappa of the two views, the total variation distance T of the predicted classes from even ones, beyond
   chance, and the likeness g of the mean prediction to that of a single class. With BatchNorm, the predictions for it
   are made with the source's statistics, while the domain is young or r small; shares a (2) and the weight of images in
   the statistics are multiplied by r. Without BatchNorm, the bias (5) is, and the step (7).
5. **Class prior** (`class_prior.py`). With the mean b of the centered log-probabilities z_i over the stream, which
   shows the classes that the network prefers, and the mean prediction pi_i of the neighbors of image i in the stream,

       log prediction_i  =  z_i - A a b + w log pi_i + const,        w = c / (c + 0.05),

   where a is the share of source mixing with D = |b|^2, V the variance of the z_i, and 0.05 (D + V) in place of 0.02;
   A is the mean share (2) over the BatchNorms, or r without BatchNorm: what a network prefers without a shift is its
   own; and c is the autocorrelation of the predictions along the stream, less what chance gives. pi is found by
   expectation maximization. In a mixed stream, b is that of the image's cluster.
6. **Loss**. The mutual information of images and classes, L = - 1/n sum_i KL(p_i || q), for the geometric mean p_i of
   the views and the mean prediction q of the stream. Classes of pixels are too uneven for it: segmentation minimizes
   the class confusion (Jin et al., ECCV 2020).
7. **Step**. Adam gives a step s for the N weights; with the expected error rate e of the domain, and with the mean
   share A over the BatchNorms (2), or the share a of the bias (5) without BatchNorm,

       theta  <-  theta + s (1 - w) A (1 - e) sqrt(n / 128 C) sqrt(2^19 / max(N, 2^14))
       theta  <-  theta + (1 - (1 - source_decay)^(n/128)) (theta_source - theta).

   Steps are short where labels are correlated, where the stream is like the training data, so that there is little to
   learn, and where many errors are expected, so that there is little to learn from; n / C is the number of images of a
   domain. Steps of Adam grow with the square root of the number of weights; the last factor makes them equally long in
   all networks.
All constants are in `constants.py`; `method.py` is the method.
"""
